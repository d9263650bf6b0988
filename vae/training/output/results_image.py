"""results.png: the curves of a run, drawn from its records."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vae.system.files import atomic_path, read_json_lines
from vae.training.output.line_chart import BLUE, GREEN, GREY, ORANGE, Box, Line, Point, draw_chart

RESULTS_NAME = "results.png"
WIDTH, HEIGHT = 1280, 800  # px
SCALE = 2  # drawn larger, then reduced: Pillow's lines have no anti-aliasing
DRAWN = ("step", "image_size", "codec", "loss", "learning_rate", "psnr", "ssim")  # of a record
LOSS_QUANTILE = 0.99  # a few high values at the start would flatten the rest of the curve

Record = dict[str, Any]


def write_results(records: Path, image: Path) -> None:
    """Draw the curves of a metrics.jsonl file as a PNG file, atomically."""
    drawn = draw_results(read_json_lines(records))
    with atomic_path(image) as temporary:
        drawn.save(temporary, format="PNG")


def draw_results(records: Iterable[Record]) -> Image.Image:
    """Loss, learning rate, and PSNR and SSIM of validation beside the baselines, over the optimizer steps."""
    by_kind: dict[str, list[Record]] = {"train": [], "validation": [], "baseline": []}
    for record in records:
        if record["kind"] in by_kind:
            # A whole record takes kilobytes of memory, and a run has many.
            by_kind[record["kind"]].append({name: record[name] for name in DRAWN if name in record})
    train, validation, baselines = by_kind.values()
    last = max([record["step"] for kind in by_kind.values() for record in kind], default=1)
    marks = _stage_marks(validation or baselines)
    charts = [
        ("training loss", [Line("loss", BLUE, points(train, "loss"))], LOSS_QUANTILE),
        ("validation: PSNR, dB", _validation_lines(validation, baselines, "psnr", last), 1.0),
        ("learning rate", [Line("learning rate", GREEN, points(train, "learning_rate"))], 1.0),
        ("validation: SSIM", _validation_lines(validation, baselines, "ssim", last), 1.0),
    ]
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
    draw, gap = ImageDraw.Draw(image), 16 * SCALE
    for index, (title, lines, quantile) in enumerate(charts):
        left, top = index % 2 * image.width / 2, index // 2 * image.height / 2
        box = Box(left + gap, top + gap, left + image.width / 2 - gap, top + image.height / 2 - gap)
        size = 14 * SCALE
        draw_chart(draw, box, title, lines, last_x=last, marks=marks, quantile=quantile, font_size=size)
    return image.reduce(SCALE)


def points(records: list[Record], name: str) -> list[Point]:
    """The finite values of `name` by step."""
    found = [(float(record["step"]), record.get(name)) for record in records]
    return [(step, value) for step, value in found if value is not None and math.isfinite(value)]


def _validation_lines(
    validation: list[Record], baselines: list[Record], name: str, last: float
) -> list[Line]:
    bicubic, mean_colour = (
        _steps([record for record in baselines if record["codec"] == codec], name, last)
        for codec in ("bicubic", "mean_colour")
    )
    return [
        Line("mean colour", GREY, mean_colour, sets_range=False),
        Line("bicubic", ORANGE, bicubic),
        Line("VAE", BLUE, points(validation, name)),
    ]


def _steps(records: list[Record], name: str, last: float) -> list[Point]:
    """A value that holds from its step to that of the next record, as the corners of a line."""
    known = points(records, name)
    corners = []
    for index, (step, value) in enumerate(known):
        end = known[index + 1][0] if index + 1 < len(known) else last
        corners += [(step, value), (end, value)]
    return corners


def _stage_marks(records: list[Record]) -> dict[float, str]:
    """The steps at which the image size changes, with the new size."""
    marks: dict[float, str] = {}
    size = None
    for record in records:
        if record["image_size"] != size:
            size = record["image_size"]
            marks[record["step"]] = f"{size} px"
    return marks
