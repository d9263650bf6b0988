"""The page of an analysis: one HTML file that needs nothing beside itself."""

import base64
from collections.abc import Iterator
from html import escape
from typing import Any

from vae.console import printable
from vae.host import GIB
from vae.prepare.analyze.dataset_stats import Sheets

TITLES = {
    "short_side": ("Short side", "px"),
    "long_side": ("Long side", "px"),
    "aspect": ("Aspect", "width / height"),
    "megapixels": ("Size", "megapixels"),
    "bits_per_pixel": ("File size", "bits per pixel"),
    "brightness": ("Brightness", "mean level, 0 to 255"),
    "contrast": ("Contrast", "standard deviation of levels"),
    "colorfulness": ("Colourfulness", "0 grey, above 80 vivid"),
    "sharpness": ("Sharpness", "fine detail over contrast"),
    "jpeg_quality": ("JPEG quality", "estimated, 1 to 100"),
    "clipped": ("Clipped", "share of pixels at 0 or 255"),
}
NOTES = {
    "Largest": "by number of pixels",
    "Smallest": "by the shorter side",
    "Most elongated": "one side more than twice the other",
    "Most blurred": "the least fine detail for their contrast; a deliberate blur counts too",
    "Blank or nearly so": "a standard deviation below 2 levels",
    "Most compressed": "estimated JPEG quality below 75",
    "Exact duplicates": "the same bytes; one row for each cluster, the largest first",
    "Near duplicates": "look alike though their bytes differ, mirrored ones too; one row for each cluster",
}
NONE_FOUND = {
    "Most elongated": "No image is more than twice as long as it is wide.",
    "Most blurred": "No image to judge.",
    "Blank or nearly so": "No image is blank.",
    "Most compressed": "No JPEG is below an estimated quality of 75.",
    "Exact duplicates": "No file is there twice.",
    "Near duplicates": "No two images look alike.",
}
PLOT_WIDTH, PLOT_HEIGHT, AXIS_HEIGHT = 300, 110, 18  # px

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60686f; --line: #d9dde1; --paper: #fff;
  --card: #f6f7f9; --bar: #3b6fb6; --low: #b8c0c8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa3ab; --line: #363c42;
  --paper: #16181b; --card: #1f2327; --bar: #6fa3e8; --low: #4a525a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 60px; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 4px; border-top: 1px solid var(--line); padding-top: 20px; }
p { margin: 4px 0 12px; color: var(--soft); }
table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: left; vertical-align: baseline; overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
.meter { width: min(220px, 18vw); height: 10px; background: var(--low); border-radius: 5px;
  overflow: hidden; }
.meter div { height: 100%; background: var(--bar); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(200px, 45%), 1fr)); gap: 10px;
  margin: 18px 0 0; }
.tile { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 20px; font-weight: 600; }
.tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)); }
.plot { background: var(--card); border-radius: 8px; padding: 10px 12px 6px; }
.plot h3 { font-size: 14px; margin: 0; font-weight: 600; }
.plot small { color: var(--soft); font-weight: 400; }
svg { display: block; width: 100%; height: auto; }
svg rect { fill: var(--bar); }
svg text { fill: var(--soft); font-size: 11px; }
svg line { stroke: var(--line); }
.sheet { display: flex; flex-wrap: wrap; gap: 12px; padding: 8px 0; align-items: flex-start; }
.sheet + .sheet { border-top: 1px dashed var(--line); }
figure { margin: 0; width: 168px; }
figure img, .gone { display: block; max-width: 168px; max-height: 168px; border: 1px solid var(--line);
  background: var(--card); }
.gone { width: 168px; height: 100px; padding: 8px; color: var(--soft); font-size: 12px; }
figcaption { font-size: 12px; overflow-wrap: anywhere; margin-top: 3px; }
figcaption span { color: var(--soft); display: block; }
"""


def page_parts(stats: dict[str, Any], sheets: Sheets, thumbnails: dict[str, Any]) -> Iterator[str]:
    """The page in pieces; `thumbnails` holds a JPEG for each name on a sheet, or why there is none."""
    title = escape(stats["input_dir"])
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>Images of {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    yield f"<h1>Images of {title}</h1>\n"
    yield from _tiles(stats)
    yield from _resolutions(stats)
    yield from _kinds(stats)
    yield "<h2>How the images are spread</h2>\n<p>Each bar is a number of images; below each plot stand "
    yield 'the median and the middle 90 %.</p>\n<div class="plots">\n'
    for name, plot in stats["histograms"].items():
        yield _plot(name, plot, stats["quantiles"][name])
    yield "</div>\n"
    for heading, rows in sheets.items():
        yield f"<h2>{escape(heading)}</h2>\n"
        if not rows:
            yield f"<p>{NONE_FOUND.get(heading, 'None.')}</p>\n"
            continue
        if heading in NOTES:
            yield f"<p>{NOTES[heading][0].upper()}{NOTES[heading][1:]}.{_counted(heading, stats)}</p>\n"
        for row in rows:
            yield '<div class="sheet">\n'
            for name, caption in row:
                yield _figure(name, caption, thumbnails.get(name))
            yield "</div>\n"
    yield "</body>\n</html>\n"


def _counted(heading: str, stats: dict[str, Any]) -> str:
    told = stats.get(heading.lower().replace(" ", "_"))
    if told is None:
        return ""
    clusters = "1 cluster" if told["clusters"] == 1 else f"{told['clusters']:,} clusters"
    return f" {clusters} of {told['images']:,} images in all."


def _tiles(stats: dict[str, Any]) -> Iterator[str]:
    space, rejected = stats["space"], sum(one["count"] for one in stats["rejected"].values())
    channels = stats["channels"]
    tiles = [
        (f"{stats['images']:,}", "images that can be read"),
        (f"{rejected:,}", "rejected"),
        (f"{stats['exact_duplicates']['superfluous']:,}", "exact copies of others"),
        (f"{stats['near_duplicates']['images']:,}", "look like another"),
        (shown_bytes(space["bytes"]), "on disk"),
        (shown_bytes(space["free_bytes"]), "free there"),
        (f"{space['bits_per_pixel']:.2f}", "bits per pixel"),
        (" ".join(f"{value:.0f}" for value in channels["mean"]), "mean of red, green, blue"),
        (" ".join(f"{value:.0f}" for value in channels["std"]), "deviation of red, green, blue"),
    ]
    yield '<div class="tiles">\n'
    for value, meaning in tiles:
        yield f'<div class="tile"><b>{escape(value)}</b><span>{escape(meaning)}</span></div>\n'
    yield "</div>\n"


def shown_bytes(number: float) -> str:
    """A size in the unit that suits it."""
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def _resolutions(stats: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Which image sizes the set supports</h2>\n"
    yield "<p>Images whose shorter side is at least --image_size, so that none is enlarged. The space is "
    yield "that of these images reduced to the size, at the bits per pixel they have now.</p>\n<table>\n"
    yield '<tr><th class="number">--image_size</th><th class="number">images</th><th></th><th></th>'
    yield '<th class="number">space</th></tr>\n'
    for one in stats["resolutions"]:
        yield f'<tr><td class="number">{one["image_size"]}</td>'
        if not one["images"]:
            yield '<td class="number">none</td><td></td><td></td><td></td></tr>\n'
            continue
        share = "all" if one["share"] == 1 else f"{100 * one['share']:.1f} %"
        yield f'<td class="number">{one["images"]:,}</td><td><div class="meter">'
        yield f'<div style="width:{one["share"]:.1%}"></div></div></td><td>{share}</td>'
        yield f'<td class="number">{shown_bytes(one["bytes_when_reduced"])}</td></tr>\n'
    yield "</table>\n"


def _kinds(stats: dict[str, Any]) -> Iterator[str]:
    """Formats, shapes, flags, and each reason of rejection with examples."""
    rows = [("Formats", stats["formats"]), ("Shapes", stats["shapes"]), ("Flags", stats["flags"])]
    yield "<h2>What they are</h2>\n<table>\n"
    for title, counts in rows:
        told = ", ".join(f"{escape(name)} {count:,}" for name, count in counts.items() if count) or "none"
        yield f"<tr><th>{title}</th><td>{told}</td></tr>\n"
    for reason, one in stats["rejected"].items():
        examples = ", ".join(map(escape, one["examples"]))
        yield f"<tr><th>Rejected</th><td>{escape(reason)} {one['count']:,}: {examples}"
        yield f"{', ...' if one['count'] > len(one['examples']) else ''}</td></tr>\n"
    yield "</table>\n"


def _plot(name: str, plot: dict[str, Any], quantiles: dict[str, float | None]) -> str:
    title, unit = TITLES[name]
    scale = ", log scale" if plot["log"] else ""
    head = f'<div class="plot"><h3>{title} <small>{unit}{scale}</small></h3>'
    if not plot["counts"]:
        return f"{head}<p>no image has it</p></div>\n"
    edges, counts = plot["edges"], plot["counts"]
    bar, most = PLOT_WIDTH / len(counts), max(counts)
    label = f"{title}: {shown_number(edges[0])} to {shown_number(edges[-1])}"
    parts = [
        f'{head}<svg viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT + AXIS_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">'
    ]
    for place, count in enumerate(counts):
        tall = max(1.0, count / most * (PLOT_HEIGHT - 12)) if count else 0
        tip = f"{shown_number(edges[place])} to {shown_number(edges[place + 1])}: {count:,}"
        parts.append(
            f'<rect x="{place * bar + 0.5:.1f}" y="{PLOT_HEIGHT - tall:.1f}" width="{bar - 1:.1f}" '
            f'height="{tall:.1f}"><title>{tip}</title></rect>'
        )
    middle = (edges[0] * edges[-1]) ** 0.5 if plot["log"] else (edges[0] + edges[-1]) / 2
    y = PLOT_HEIGHT + AXIS_HEIGHT - 4
    parts.append(f'<line x1="0" y1="{PLOT_HEIGHT}" x2="{PLOT_WIDTH}" y2="{PLOT_HEIGHT}"/>')
    for x, anchor, value in ((0, "start", edges[0]), (0.5, "middle", middle), (1, "end", edges[-1])):
        parts.append(
            f'<text x="{x * PLOT_WIDTH}" y="{y}" text-anchor="{anchor}">{shown_number(value)}</text>'
        )
    span = f"{shown_number(quantiles['p5'])} to {shown_number(quantiles['p95'])}"
    left_out = f"; {plot['left_out']:,} at 0 or without" if plot["left_out"] else ""
    median = shown_number(quantiles["p50"])
    parts.append(f"</svg><p><small>median {median}, 90 % {span}{left_out}</small></p></div>\n")
    return "".join(parts)


def shown_number(value: float) -> str:
    """A number with as many digits as say something."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _figure(name: str, caption: str, image: Any) -> str:
    told = escape(printable(name))
    if isinstance(image, bytes):
        data = base64.b64encode(image).decode("ascii")
        shown = f'<img src="data:image/jpeg;base64,{data}" alt="{told}">'
    else:
        shown = f'<div class="gone">{escape(getattr(image, "reason", "not read"))}</div>'
    return f"<figure>{shown}<figcaption>{told}<span>{escape(caption)}</span></figcaption></figure>\n"
