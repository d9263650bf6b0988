"""The report of a comparison: one HTML file that needs no other file and no network.

For each image that is shown, the page contains the original and each reconstruction, lossless and at most
MAX_SIDE px a side, and for each VAE a smaller error map and the latent channels. Each is a link to its file.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vae.evaluation.results import ERROR_GAIN, METRICS, Results, Sample, VaeResult
from vae.evaluation.tables import (
    Table,
    configuration_tables,
    diagnosis_lines,
    diagnosis_table,
    diffusability_table,
    hardest_table,
    latent_table,
    metric_columns,
    quality_lines,
    quality_tables,
    rank_lines,
    speed_tables,
)
from vae.images.composites import shown
from vae.system.console import printable
from vae.system.files import replace_text

MAX_SIDE = 768  # px: of a larger image, the page contains the middle at 100 %, so that it stays small
ERROR_SIDE = 384  # px: longest side of an error map
LATENT_SIDE = 128  # px: longest side of a latent channel
WHY = {"worst": "among the worst", "typical": "in the middle", "best": "among the best"}


def data_uri(content: bytes, kind: str) -> Markup:
    """An image as a data: URI for an attribute. It is marked as safe, so rendering does not scan it."""
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}")


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
        diffusability=diffusability_table(results),
        rank_warnings=rank_lines(results),
        diagnosis=diagnosis_table(results),
        diagnosis_verdicts=diagnosis_lines(results),
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
    """The attributes of an <img> element."""

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
    """The content that one VAE adds below the slider."""
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
