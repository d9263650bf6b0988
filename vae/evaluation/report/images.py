"""The images of the report, embedded: versions for the slider, error maps, latent channels.

For each image that is shown, the page contains the original and each reconstruction, lossless and at most
MAX_SIDE px a side, and for each VAE a smaller error map and the latent channels. Each is a link to its file.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from vae.evaluation.report.tables import Table, metric_columns
from vae.evaluation.results import Results, Sample, VaeResult
from vae.html import data_uri
from vae.system.files import open_regular

MAX_SIDE = 768  # px: of a larger image, the page contains the middle at 100 %, so that it stays small
ERROR_SIDE = 384  # px: longest side of an error map
LATENT_SIDE = 128  # px: longest side of a latent channel
WHY = {"worst": "among the worst", "typical": "in the middle", "best": "among the best"}


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
    columns = metric_columns(
        results, vaes, results.protocol.sizes[-1], [sample.metrics for _, sample in pairs]
    )
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
    with Image.open(open_regular(path)) as image:
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
    with Image.open(open_regular(path)) as image:
        width, height = (min(side, MAX_SIDE) for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        middle = image.convert("RGB").crop((left, top, left + width, top + height))
    # WebP is a quarter smaller than PNG. Method 1 takes as long as PNG; higher methods save only 4 % more.
    return _embedded(middle, path, alt, "WEBP", lossless=True, method=1)


def _error_map(path: Path, alt: str) -> EmbeddedImage:
    with Image.open(open_regular(path)) as image:
        small = image.convert("RGB")
    small.thumbnail((ERROR_SIDE, ERROR_SIDE), Image.Resampling.BOX)
    return _embedded(small, path, alt, "WEBP", quality=80)


def _channel(path: Path, alt: str) -> EmbeddedImage:
    with Image.open(open_regular(path)) as image:
        small = image.reduce(-(-max(image.size) // LATENT_SIDE))
    return _embedded(small, path, alt, "PNG", optimize=True)


def _embedded(image: Image.Image, path: Path, alt: str, format: str, **options: object) -> EmbeddedImage:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    uri = data_uri(buffer.getvalue(), f"image/{format.lower()}")
    return EmbeddedImage(uri, image.width, image.height, alt, f"{path.parent.name}/{path.name}")
