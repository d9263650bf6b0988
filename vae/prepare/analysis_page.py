"""The HTML page of an analysis: texts and charts for the template analysis.html.jinja."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vae.charts import BLUE, PAGE_SCALE, new_figure, png
from vae.html import data_uri, page_chart, write_page
from vae.prepare.dataset_stats import SECTIONS, Rows
from vae.system.console import printable
from vae.system.host import GIB, MIB

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
TWINS = {
    "Exact duplicates": (
        "The same bytes; one row per cluster, the largest first.",
        "All files are different.",
    ),
    "Near duplicates": (
        "They look alike, also if mirrored; one row per group, largest first.",
        "No two images look alike.",
    ),
}


def write_analysis_page(
    path: Path, stats: dict[str, Any], sections: dict[str, Rows], thumbnails: Mapping[int, bytes]
) -> None:
    """Write the page; `thumbnails` has a JPEG of each example image, by its number in the table."""
    write_page(
        path,
        "analysis.html.jinja",
        input_dir=stats["input_dir"],
        tiles=_tiles(stats),
        resolutions=[_resolution(one) for one in stats["resolutions"]],
        kinds=_kinds(stats),
        charts=[_chart(name, plot, stats["quantiles"][name]) for name, plot in stats["histograms"].items()],
        sections=[
            {
                "heading": heading,
                "note": _note(heading, stats, is_empty=not rows),
                "rows": [
                    [_figure(name, caption, thumbnails.get(n)) for n, name, caption in row] for row in rows
                ],
            }
            for heading, rows in sections.items()
        ],
    )


def _note(heading: str, stats: dict[str, Any], *, is_empty: bool) -> str:
    if heading in SECTIONS:
        return SECTIONS[heading].none_found if is_empty else SECTIONS[heading].note
    note, none_found = TWINS[heading]
    counts = stats[heading.lower().replace(" ", "_")]
    return none_found if is_empty else f"{note} {counts['clusters']:,} with {counts['images']:,} images."


def _tiles(stats: dict[str, Any]) -> list[tuple[str, str]]:
    space, channels = stats["space"], stats["channels"]
    rejected = sum(one["count"] for one in stats["rejected"].values())
    return [
        (f"{stats['images']:,}", "images that can be read"),
        (f"{rejected:,}", "rejected"),
        (f"{stats['exact_duplicates']['superfluous']:,}", "exact copies of others"),
        (f"{stats['near_duplicates']['images']:,}", "near duplicates"),
        (_bytes_text(space["bytes"]), "on disk"),
        (_bytes_text(space["free_bytes"]), "free on that disk"),
        (f"{space['bits_per_pixel']:.2f}", "bits per pixel"),
        (" ".join(f"{value:.0f}" for value in channels["mean"]), "mean of red, green, blue"),
        (" ".join(f"{value:.0f}" for value in channels["std"]), "standard deviation of red, green, blue"),
    ]


def _resolution(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "image_size": one["image_size"],
        "images": f"{one['images']:,}" if one["images"] else "none",
        "percent": f"{100 * one['share']:.1f}",
        "share": "all" if one["share"] == 1 else f"{100 * one['share']:.1f} %",
        "space": _bytes_text(one["bytes_when_reduced"]),
    }


def _kinds(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Formats, shapes and flags with their counts, and each reason for rejection with examples."""
    kinds = []
    for title in ("formats", "shapes", "flags"):
        counts = ", ".join(f"{name} {count:,}" for name, count in stats[title].items() if count)
        kinds.append((title.capitalize(), counts or "none"))
    for reason, one in stats["rejected"].items():
        more = ", ..." if one["count"] > len(one["examples"]) else ""
        kinds.append(("Rejected", f"{reason} {one['count']:,}: {', '.join(one['examples'])}{more}"))
    return kinds


def _chart(name: str, plot: dict[str, Any], quantiles: dict[str, float | None]) -> dict[str, Any]:
    """A histogram and what is below it."""
    title, unit = TITLES[name]
    edges, counts = plot["edges"], plot["counts"]
    median, low, high = (quantiles[name] for name in ("p50", "p5", "p95"))
    if median is None or low is None or high is None:
        return {"title": title, "note": "", "uri": "", "summary": "no image has this value"}
    figure, (axes,) = new_figure()
    axes.stairs(counts, edges, fill=True, color=BLUE)
    axes.set_ylim(bottom=0)
    middle = (edges[0] * edges[-1]) ** 0.5 if plot["log"] else (edges[0] + edges[-1]) / 2
    axes.set_xscale("log" if plot["log"] else "linear")
    axes.minorticks_off()
    ticks = (edges[0], middle, edges[-1])
    axes.set_xticks(ticks, [_number_text(tick) for tick in ticks])
    label = f"{title}: {_number_text(edges[0])} to {_number_text(edges[-1])}"
    summary = f"median {_number_text(median)}, 90 % {_number_text(low)} to {_number_text(high)}"
    left_out = f"; {plot['left_out']:,} with 0 or without a value" if plot["left_out"] else ""
    chart = page_chart(png(figure, PAGE_SCALE), title, unit + (", log scale" if plot["log"] else ""), label)
    return {**chart._asdict(), "summary": summary + left_out}


def _figure(name: str, caption: str, thumbnail: bytes | None) -> dict[str, Any]:
    if thumbnail is None:
        return {"name": printable(name), "caption": caption, "uri": None, "reason": "unreadable"}
    return {"name": printable(name), "caption": caption, "uri": data_uri(thumbnail, "image/jpeg")}


def _bytes_text(number: float) -> str:
    for unit, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.3g}"
