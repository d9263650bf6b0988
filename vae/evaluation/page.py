"""The report of a comparison: one HTML file that needs no other file and no network.

For each image that is shown, the page contains the original and each reconstruction, lossless and at most
MAX_SIDE px a side, and for each VAE a smaller error map and the latent channels. Each is a link to its file.
"""

import base64
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vae.charts import PAGE_SCALE, Line, draw_lines, new_figure, png
from vae.evaluation.latents import TAUS
from vae.evaluation.results import ERROR_GAIN, METRICS, LatentFacts, Results, Sample, VaeResult
from vae.evaluation.tables import (
    Table,
    configuration_tables,
    diffusability_table,
    hardest_table,
    latent_table,
    metric_columns,
    quality_lines,
    quality_tables,
    rank_lines,
    shown_number,
    speed_tables,
)
from vae.images.composites import shown
from vae.interop.run_files import OTHER_DATA
from vae.system.console import printable
from vae.system.files import read_json_lines, replace_text

LOG_FROM = 50  # ratio of the largest to the smallest value above which the axis is logarithmic
KINDS = {"validation": "Validation images", "train": "Training"}
NOT_DRAWN = {"kind", "step", "epoch", "image_size", "images"}  # keys of a record that are not measurements
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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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


MAX_SIDE = 768  # px: of a larger image, the page contains the middle at 100 %, so that it stays small
ERROR_SIDE = 384  # px: longest side of an error map
LATENT_SIDE = 128  # px: longest side of a latent channel
WHY = {"worst": "among the worst", "typical": "in the middle", "best": "among the best"}


def write_report(results: Results, path: Path) -> None:
    """Write the report to `path` atomically; the image files of its samples are read and embedded."""
    environment = Environment(
        loader=PackageLoader("vae"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    styles = line_styles(results.vaes)
    page = environment.get_template("report.html.jinja").generate(
        names=[vae.name for vae in results.vaes if vae.is_network],
        has_references=any(not vae.is_network for vae in results.vaes),
        protocol=results.protocol,
        environment=results.environment,
        quality=quality_tables(results),
        quality_verdicts=quality_lines(results),
        missing={_title(name): reason for name, reason in results.missing.items()},
        images=articles(results),
        error_gain=ERROR_GAIN,
        hardest=hardest_table(results),
        speed=speed_tables(results),
        latents=latent_table(results),
        channel_charts=[channel_chart(vae.name, vae.latents) for vae in results.vaes if vae.latents],
        diffusability=diffusability_table(results),
        rank_warnings=rank_lines(results),
        noise_charts=noise_charts(results.vaes),
        line_styles=styles,
        curve_styles={vae.name: styles[vae.name] for vae in results.vaes if vae.curves},
        curves=curve_charts(results.vaes),
        configuration=configuration_tables(results),
    )
    replace_text(path, page)


def _printable(value: object) -> object:
    """Make plain text printable on one line; markup and other values are unchanged."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _title(missing: str) -> str:
    """The title of a missing metric, with its size; other missing things are named as they are."""
    name, at, size = missing.partition(" at ")
    return METRICS[name].title + at + size if name in METRICS else missing


@dataclass(frozen=True)
class EmbeddedImage:
    """What an <img> element needs."""

    uri: Markup
    width: int
    height: int
    alt: str
    file: str  # from the page's folder, as a link to the whole image


def articles(results: Results) -> Iterator[dict[str, Any]]:
    """One article for each sample image, the worst first; its files are read when it is taken."""
    by_name: dict[str, list[tuple[VaeResult, Sample]]] = {}
    for vae in results.vaes:
        for sample in vae.samples:
            by_name.setdefault(sample.name, []).append((vae, sample))
    worst_first = sorted(by_name.values(), key=lambda pairs: list(WHY).index(pairs[0][1].why))
    return (_article(pairs, results) for pairs in worst_first)


def _article(pairs: list[tuple[VaeResult, Sample]], results: Results) -> dict[str, Any]:
    """One image with all its reconstructions, as report_images.html.jinja shows it."""
    first = pairs[0][1]
    vaes = [vae for vae, _ in pairs]
    columns = metric_columns(vaes, [sample.metrics for _, sample in pairs])
    original = _lossless(first.original, f"{first.name}, original")
    recons = [
        (vae.name, _lossless(sample.recon, f"{sample.name}, reconstruction by {vae.name}"))
        for vae, sample in pairs
    ]
    return {
        "name": first.name,
        "subtitle": f"{WHY[first.why]} · {_shown_size(first.original, original)}",
        "layers": [("original", original), *recons],
        "metrics": Table("Metrics of this whole image", [vae.name for vae in vaes], columns),
        "absent": [vae.name for vae in results.vaes if vae not in vaes],  # they could not reconstruct it
        "vaes": [_below_slider(vae, sample) for vae, sample in pairs],
    }


def _shown_size(path: Path, shown: EmbeddedImage) -> str:
    with Image.open(path) as image:
        whole = image.size
    cut = "" if whole == (shown.width, shown.height) else f", the middle of {whole[0]} × {whole[1]}"
    return f"{shown.width} × {shown.height} px{cut}"


def _below_slider(vae: VaeResult, sample: Sample) -> dict[str, Any]:
    """What one VAE adds below the slider."""
    count = len(sample.latents)
    total = vae.latents.channels if vae.latents else count
    return {
        "name": vae.name,
        "error_map": _error_map(sample.error, f"error map of {vae.name} for {sample.name}"),
        "channels": [
            _channel(path, f"latent channel {channel} of {vae.name} for {sample.name}")
            for channel, path in enumerate(sample.latents)
        ],
        "channels_left_out": f", the first {count} of {total}" if total > count else "",
        "dead_channels": vae.latents.dead_channels if vae.latents else [],
    }


def _lossless(path: Path, alt: str) -> EmbeddedImage:
    """The image, or its middle if it is larger than MAX_SIDE px."""
    with Image.open(path) as image:
        width, height = (min(side, MAX_SIDE) for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        middle = shown(image).crop((left, top, left + width, top + height))
    # WebP is a quarter smaller than PNG. Method 1 takes as long as PNG; higher methods save only 4 % more.
    return _embedded(middle, path, alt, "WEBP", lossless=True, method=1)


def _error_map(path: Path, alt: str) -> EmbeddedImage:
    with Image.open(path) as image:
        small = image.convert("RGB")
    small.thumbnail((ERROR_SIDE, ERROR_SIDE), Image.Resampling.BOX)
    return _embedded(small, path, alt, "WEBP", quality=80)


def _channel(path: Path, alt: str) -> EmbeddedImage:
    with Image.open(path) as image:
        small = image.reduce(-(-max(image.size) // LATENT_SIDE))
    return _embedded(small, path, alt, "PNG", optimize=True)


def _embedded(image: Image.Image, path: Path, alt: str, format: str, **options: object) -> EmbeddedImage:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    uri = data_uri(buffer.getvalue(), format.lower())
    return EmbeddedImage(uri, image.width, image.height, alt, f"{path.parent.name}/{path.name}")
