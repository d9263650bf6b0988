"""The report of a comparison: one HTML file that needs nothing beside itself and no network.

The page forbids itself everything from outside by its content security policy: images come from data: URIs,
and style and script run by their SHA-256 alone, so that no name or path smuggled in could.
"""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

from vae.evaluation.report.charts import channel_chart, curves
from vae.evaluation.report.html import name_of, told
from vae.evaluation.report.images import images
from vae.evaluation.report.tables import configuration, latents, lowest, probes, quality, speed
from vae.evaluation.results import Results
from vae.files import atomic_path

SECTIONS = {
    "quality": "Quality",
    "images": "Images",
    "hardest": "Hardest images",
    "speed": "Speed and memory",
    "latents": "Latents",
    "probes": "Equivariance and grid artefacts",
    "curves": "Training curves",
    "configuration": "Configuration and environment",
}


def write_report(results: Results, path: Path) -> None:
    """Write the report to `path`, whole or not at all; the images of its samples are read and embedded."""
    with (
        atomic_path(path) as temporary,
        # newline: the policy's hashes are of "\n"
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        for part in page_parts(results):
            file.write(part)


def page_parts(results: Results) -> Iterator[str]:
    """The page in pieces."""
    style, script = (Path(__file__).with_name(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    networks = [vae for vae in results.vaes if vae.kind != "codec"]
    title = " · ".join(vae.name for vae in networks)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>Comparison: {told(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    yield from _head(results, [vae.name for vae in networks])
    for section, heading in SECTIONS.items():
        yield f'<section id="{section}">\n<h2>{heading}</h2>\n'
        yield from _section(section, results)
        yield "</section>\n"
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _policy(style: str, script: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; "
        f"script-src 'sha256-{hashes[1]}'; base-uri 'none'; form-action 'none'"
    )


def _head(results: Results, names: list[str]) -> Iterator[str]:
    protocol = results.protocol
    yield f"<header>\n<h1>{', '.join(map(name_of, names))}</h1>\n"
    yield f"<p>{protocol.images} images of {name_of(protocol.data_path)}; {told(protocol.crop)}; "
    yield f"posterior's {told(protocol.posterior)}; {told(protocol.rounding)}; {told(protocol.dtype)} on "
    yield f"{told(protocol.device)}; {told(results.environment.get('date', 'no date'))}.</p>\n"
    yield '<nav aria-label="Sections"><ul>\n'
    for section, heading in SECTIONS.items():
        yield f'<li><a href="#{section}">{heading}</a></li>\n'
    yield "</ul></nav>\n</header>\n"


def _section(section: str, results: Results) -> Iterator[str]:
    if section == "quality":
        yield "<p>Means over all images; rFID is one distance over the whole set. ↑ higher is better, "
        yield "↓ lower; ★ is the best of the VAEs. JPEG and WebP, where listed, have as many bytes as the "
        yield "latent in 8 bit and take no part.</p>\n"
        yield from quality(results)
    elif section == "images":
        yield "<p>Drag over an image, or focus it and use the arrow keys. At 100 % one pixel of the image "
        yield "is one pixel of the screen.</p>\n"
        yield "<noscript><p>The sliders need JavaScript; errors, numbers and latents do not.</p></noscript>\n"
        yield '<p class="controls" hidden><label>Zoom <select id="zoom"><option value="1">100 %</option>'
        yield '<option value="2">200 %</option><option value="4">400 %</option></select></label></p>\n'
        yield from images(results)
    elif section == "hardest":
        yield from lowest(results)
    elif section == "speed":
        yield f"<p>{told(results.protocol.device)}, {told(results.protocol.dtype)}, batches of "
        yield f"{results.protocol.batch_size}.</p>\n"
        yield from speed(results)
    elif section == "latents":
        yield from latents(results)
        yield '<div class="plots">\n'
        for vae in results.vaes:
            if vae.latents:
                yield channel_chart(vae.name, vae.latents)
        yield "</div>\n"
    elif section == "probes":
        yield from probes(results)
    elif section == "curves":
        yield from curves(results.vaes)
    else:
        yield from configuration(results)
