"""results.png: the curves of a run, drawn from its records."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vae.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Line,
    Points,
    draw_lines,
    finite_points,
    mark_x,
    new_figure,
    png,
    write_chart,
)
from vae.system.files import read_json_lines

RESULTS_NAME = "results.png"
WIDTH, HEIGHT = 1280, 800  # px
DRAWN = ("step", "image_size", "codec", "loss", "learning_rate", "psnr", "adversarial_share")  # of a record
LOSS_QUANTILE = 0.99  # a few high values at the start would flatten the rest of the curve

Record = dict[str, Any]


def write_results(records: Path, image: Path) -> bool:
    """Draw the curves of a metrics.jsonl file as a PNG file, atomically; False if they cannot be drawn."""
    return write_chart(image, lambda: draw_results(read_json_lines(records)))


def draw_results(records: Iterable[Record]) -> bytes:
    """Draw training loss, learning rate, and loss and PSNR of validation beside the baselines."""
    by_kind: dict[str, list[Record]] = {"train": [], "validation": [], "baseline": []}
    for record in records:
        if record["kind"] in by_kind:
            # A whole record takes kilobytes of memory, and a run has many.
            by_kind[record["kind"]].append({name: record[name] for name in DRAWN if name in record})
    train, validation, baselines = by_kind.values()
    last = max([record["step"] for kind in by_kind.values() for record in kind], default=1)
    charts = [
        ("training loss", [Line(BLUE, finite_points(train, "loss"), "loss")], LOSS_QUANTILE),
        ("validation: loss", _validation_lines(validation, baselines, "loss", last), 1.0),
        ("learning rate", [Line(GREEN, finite_points(train, "learning_rate"), "learning rate")], 1.0),
        ("validation: PSNR, dB", _validation_lines(validation, baselines, "psnr", last), 1.0),
    ]
    figure, axes = new_figure(WIDTH, HEIGHT, rows=2, columns=2)
    for chart, (title, lines, quantile) in zip(axes, charts, strict=True):
        chart.set_title(title, loc="left", fontsize=11)
        chart.set_xlim(0, max(last, 1))
        chart.set_xlabel("step")
        chart.ticklabel_format(axis="y", scilimits=(-3, 4))
        mark_x(chart, _stage_marks(validation or baselines))
        draw_lines(chart, lines, quantile=quantile)
    return png(figure)


def _validation_lines(
    validation: list[Record], baselines: list[Record], name: str, last: float
) -> list[Line]:
    bicubic, mean_colour = (
        _steps([record for record in baselines if record["codec"] == codec], name, last)
        for codec in ("bicubic", "mean_colour")
    )
    return [
        Line(GREY, mean_colour, "mean colour", sets_range=False),
        Line(ORANGE, bicubic, "bicubic"),
        Line(BLUE, finite_points(validation, name), "VAE"),
    ]


def _steps(records: list[Record], name: str, last: float) -> Points:
    """Return a value that holds from its step to that of the next record, as the corners of a line."""
    known = finite_points(records, name)
    ends = [*(step for step, _ in known[1:]), last]
    return [
        corner
        for (step, value), end in zip(known, ends, strict=False)
        for corner in ((step, value), (end, value))
    ]


def _stage_marks(records: list[Record]) -> dict[float, str]:
    """The steps at which the image size changes or the adversarial loss has begun, with the new size."""
    marks: dict[float, str] = {}
    before = None
    for record in records:
        phase = record["image_size"], bool(record.get("adversarial_share"))
        if phase != before:
            marks[record["step"]] = f"{phase[0]} px{', adversarial' * phase[1]}"
        before = phase
    return marks
