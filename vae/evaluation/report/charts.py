"""The report's charts: training curves and latent channels, as images with a text for screen readers."""

import base64
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from vae.charts import PAGE_SCALE, Line, draw_lines, new_figure, png
from vae.evaluation.diffusability import TAUS
from vae.evaluation.report.tables import shown_number
from vae.evaluation.results import METRICS, LatentFacts, VaeResult
from vae.interop.run_files import OTHER_DATA
from vae.system.files import read_json_lines

LOG_FROM = 50  # ratio of the largest to the smallest value above which the axis is logarithmic
KINDS = {"validation": "Validation images", "train": "Training"}
NOT_DRAWN = {"kind", "step", "epoch", "image_size", "images"}  # keys of a record that are not measurements
MAX_VALUE = 1e300  # above it, sums of two values could overflow
# Colours that differ in brightness, too, and dashes, for each VAE.
COLOURS = ("#2b62ad", "#c2571a", "#15805a", "#8a4b9c", "#8d7100", "#5b636a")
DASHES = (None, (6, 2), (2, 2), (8, 2, 2, 2), (10, 4), (4, 4))

MAX_CURVE_RECORDS = 2000  # training records per VAE; more are thinned evenly, so that the page stays small


class PageChart(NamedTuple):
    """A chart in the page; `label` is its text for screen readers."""

    title: str
    note: str
    label: str
    uri: Markup


def data_uri(content: bytes, kind: str) -> Markup:
    """An image as a data: URI for an attribute. It is marked as safe, so rendering does not scan it."""
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}")


class Style(NamedTuple):
    """A line's colour and dashes: points drawn, points left out, ..."""

    colour: str
    dashes: tuple[int, ...] | None


def line_styles(vaes: list[VaeResult]) -> dict[str, Style]:
    """The style of each VAE by its name; 36 differ, and the first six differ in both."""
    count = len(COLOURS)
    names = [vae.name for vae in vaes if vae.is_network]
    return {name: Style(COLOURS[i % count], DASHES[(i + i // count) % count]) for i, name in enumerate(names)}


def noise_charts(vaes: list[VaeResult]) -> list[PageChart]:
    """PSNR after decoding with noise, as at most one chart; none if it was not measured."""
    noise = {
        vae.name: [
            (tau, value) for tau in TAUS if (value := vae.diffusability[f"noise {tau:g} dB"]) is not None
        ]
        for vae in vaes
        if vae.diffusability
    }
    noise = {name: points for name, points in noise.items() if points}
    return [_line_chart("PSNR dB by noise", noise, line_styles(vaes), "standard deviations")] if noise else []


def curve_charts(vaes: list[VaeResult]) -> dict[str, list[PageChart]]:
    """Every value that the runs recorded, as charts grouped by the kind of record."""
    styles = line_styles(vaes)
    groups = {}
    for kind, title in KINDS.items():
        series = {vae.name: _series_of(vae.curves, kind) for vae in vaes if vae.curves}
        metrics = dict.fromkeys(metric for values in series.values() for metric in values)
        charts = []
        for metric in metrics:
            shown = {name: values[metric] for name, values in series.items() if metric in values}
            heading = METRICS[metric].title if metric in METRICS else metric.replace("_", " ")
            charts.append(_line_chart(heading, shown, styles))
        if charts:
            groups[title] = charts
    return groups


def _series_of(records: list[dict[str, Any]], kind: str) -> dict[str, list[tuple[float, float]]]:
    """Metric -> (step, value) of one kind of record, without values that are not finite numbers."""
    series: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.get("kind") != kind or not _is_number(record.get("step")):
            continue
        for key, value in record.items():
            if key not in NOT_DRAWN and _is_number(value):
                series.setdefault(str(key), []).append((record["step"], value))
    return series


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_VALUE


def _line_chart(
    title: str, series: dict[str, list[tuple[float, float]]], styles: dict[str, Style], x: str = ""
) -> PageChart:
    """One metric by step, or by `x`, one line per VAE; every series has at least one point."""
    values = [value for points in series.values() for _, value in points]
    is_log = min(values) > 0 and max(values) / min(values) > LOG_FROM
    figure, (axes,) = new_figure()
    if is_log:
        axes.set_yscale("log")
    draw_lines(
        axes,
        [Line(styles[name].colour, points, dashes=styles[name].dashes) for name, points in series.items()],
    )
    ranges = "; ".join(
        f"{name} from {shown_number(points[0][1])} to {shown_number(points[-1][1])}"
        for name, points in series.items()
    )
    remark = ", ".join(filter(None, [x, "log scale" if is_log else ""]))
    label = f"{title} by {x or 'step'}: {ranges}"
    return PageChart(title, remark, label, data_uri(png(figure, PAGE_SCALE), "png"))


def channel_chart(name: str, facts: LatentFacts) -> PageChart:
    """Mean and standard deviation of each latent channel; dead channels have another colour."""
    channels = range(facts.channels)
    figure, (axes,) = new_figure()
    lows = [mean - std for mean, std in zip(facts.mean, facts.std, strict=True)]
    colours = [COLOURS[1 if channel in facts.dead_channels else 0] for channel in channels]
    axes.bar(channels, [2 * std for std in facts.std], 0.6, lows, color=colours, alpha=0.6)
    axes.hlines(facts.mean, [c - 0.45 for c in channels], [c + 0.45 for c in channels], color="#222222")
    axes.use_sticky_edges = False  # a margin below the lowest bar
    axes.xaxis.get_major_locator().set_params(integer=True)
    label = f"mean and standard deviation of {facts.channels} latent channels of {name}"
    return PageChart(name, "mean ± std of each channel", label, data_uri(png(figure, PAGE_SCALE), "png"))


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl, training records thinned evenly; none if the file does not exist."""
    if not path.is_file():
        return []
    records = list(read_json_lines(path))
    train = [record for record in records if record.get("kind") == "train"]
    every = -(-len(train) // MAX_CURVE_RECORDS) or 1
    kept = {id(record) for record in train[::every]}
    return [record for record in records if record.get("kind") != "train" or id(record) in kept]


def branches(curves: list[dict[str, Any]]) -> str | None:
    """The steps from which a run used other images or transforms than before, and what changed."""
    runs = [record for record in curves if record.get("kind") == "run" and record.get("resume") == OTHER_DATA]
    return "; ".join(f"from step {run.get('step')}: {run.get('changed')}" for run in runs) or None
