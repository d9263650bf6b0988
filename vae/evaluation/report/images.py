"""The images of the report: a slider between any two versions, errors, latent channels; all embedded.

What is embedded, for each image that is shown: the original once and each reconstruction, without loss and
at most MAX_SIDE px a side; a small error map and the latent channels of each VAE.
"""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from vae.evaluation.report.html import name_of, table, told
from vae.evaluation.report.tables import metric_columns
from vae.evaluation.results import Results, Sample, VaeResult
from vae.evaluation.samples import ERROR_GAIN

MAX_SIDE = 768  # px: a larger image shows its middle, so that 100 % stays 100 % and the page can be sent
ERROR_SIDE = 240  # px of the small error maps
LATENT_SIDE = 128  # px at most of a channel
WHY = {"worst": "among the worst", "typical": "in the middle", "best": "among the best"}


def images(results: Results) -> Iterator[str]:
    """One article for each image kept, the worst first."""
    by_name: dict[str, list[tuple[VaeResult, Sample]]] = {}
    for vae in results.vaes:
        for sample in vae.samples:
            by_name.setdefault(sample.name, []).append((vae, sample))
    shown = sorted(by_name.values(), key=lambda found: list(WHY).index(found[0][1].why))
    if not shown:
        yield "<p>No image was kept.</p>\n"
    for place, found in enumerate(shown):
        yield from _article(place, found, results)


def _article(place: int, found: list[tuple[VaeResult, Sample]], results: Results) -> Iterator[str]:
    sample = found[0][1]
    vaes = [vae for vae, _ in found]
    original = _middle(sample.original)
    width, height = original.size
    with Image.open(sample.original) as whole:
        cut = f", the middle of {whole.width} × {whole.height}" if whole.size != original.size else ""
    yield f'<article class="image" id="image-{place}">\n<h3>{name_of(sample.name)} '
    yield f"<small>{WHY[sample.why]} · {width} × {height} px{cut}</small></h3>\n"
    yield from _slider(place, [_layer(original, "original", sample.name)], found)
    values = [one.metrics for _, one in found]
    columns = metric_columns(results, vaes, results.protocol.sizes[-1], values)
    absent = [vae.name for vae in results.vaes if vae not in vaes]
    yield table("Of this whole image", [vae.name for vae in vaes], columns)
    if absent:
        yield f"<p>Not reconstructed by {', '.join(map(name_of, absent))}.</p>\n"
    yield '<div class="strip">\n'
    for vae, one in found:
        yield f"<figure>{_error_map(one, vae.name)}<figcaption>error of {name_of(vae.name)}, "
        yield f"{ERROR_GAIN} times brightened</figcaption></figure>\n"
    yield "</div>\n"
    for vae, one in found:
        if one.latents:
            yield from _channels(vae, one)
    yield "</article>\n"


def _slider(place: int, layers: list[str], found: list[tuple[VaeResult, Sample]]) -> Iterator[str]:
    """Images on top of each other, one of them uncovered by a range input that lies over them all."""
    names = ["original", *(vae.name for vae, _ in found)]
    name = found[0][1].name
    layers += [_layer(_middle(one.recon), f"reconstruction by {vae.name}", one.name) for vae, one in found]
    yield '<div class="controls" hidden>\n'
    for side, chosen in (("left", 0), ("right", 1)):
        options = "".join(
            f'<option value="{number}"{" selected" if number == chosen else ""}>{told(option)}</option>'
            for number, option in enumerate(names)
        )
        yield f'<label>{side.capitalize()} <select data-side="{side}">{options}</select></label>\n'
    yield '<label><input type="checkbox" class="difference"> Difference of the two, '
    yield f"{ERROR_GAIN} times brightened</label>\n"
    yield '</div>\n<div class="scroll"><div class="stack"><div class="layers">\n'
    yield "\n".join(layers)
    yield '\n</div><div class="cut" aria-hidden="true"></div>\n'
    yield f'<input type="range" class="slide" id="slide-{place}" min="0" max="100" step="0.5" value="50" '
    yield f'aria-label="Boundary between left and right version of {told(name)}, in percent">\n</div></div>\n'


def _layer(image: Image.Image, what: str, name: str) -> str:
    width, height = image.size
    return (
        f'<img class="layer" src="{_lossless(image)}" width="{width}" height="{height}" decoding="async" '
        f'alt="{told(f"{name}, {what}")}">'
    )


def _channels(vae: VaeResult, sample: Sample) -> Iterator[str]:
    dead = set(vae.latents.dead_channels) if vae.latents else set()
    total = vae.latents.channels if vae.latents else len(sample.latents)
    left_out = f", the first {len(sample.latents)} of {total}" if total > len(sample.latents) else ""
    yield f'<h4>Latent channels of {name_of(vae.name)}{left_out}</h4>\n<div class="channels">\n'
    for channel, path in enumerate(sample.latents):
        with Image.open(path) as image:
            small = image.reduce(-(-max(image.size) // LATENT_SIDE))
        state = f"{channel}, dead" if channel in dead else str(channel)
        alt = told(f"latent channel {channel} of {vae.name} for {sample.name}")
        yield f'<figure><img src="{_embedded(small, "PNG", optimize=True)}" width="{small.width}" '
        yield f'height="{small.height}" alt="{alt}"><figcaption>{state}</figcaption></figure>\n'
    yield "</div>\n"


def _error_map(sample: Sample, vae: str) -> str:
    with Image.open(sample.error) as image:
        small = image.convert("RGB")
    small.thumbnail((ERROR_SIDE, ERROR_SIDE), Image.Resampling.BOX)
    alt = told(f"error map of {vae} for {sample.name}")
    return (
        f'<img src="{_embedded(small, "WEBP", quality=80)}" width="{small.width}" height="{small.height}" '
        f'alt="{alt}">'
    )


def _middle(path: Path) -> Image.Image:
    """The image, or the middle MAX_SIDE px of it."""
    with Image.open(path) as image:
        width, height = (min(side, MAX_SIDE) for side in image.size)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.convert("RGB").crop((left, top, left + width, top + height))


def _lossless(image: Image.Image) -> str:
    # WebP is a quarter smaller than PNG; method 1 takes the time of a PNG, and higher ones win 4 % more
    return _embedded(image, "WEBP", lossless=True, method=1)


def _embedded(image: Image.Image, kind: str, **options: object) -> str:
    """The image as a data: URI."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
