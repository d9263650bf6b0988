"""Statistics of a set from the measurements of its images: numbers, histograms and example images."""

from typing import Any, NamedTuple

import numpy as np

from vae.config.recipes import RECIPES
from vae.prepare.selection import EXACT, LARGEST_FIRST
from vae.prepare.table import Table
from vae.system.console import printable

# Image sizes of the profiles, in px, without the 128 px of the demo.
RESOLUTIONS = sorted({recipe.values["image_size"] for name, recipe in RECIPES.items() if name != "demo"})
QUANTILES = {"min": 0, "p1": 1, "p5": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}
EXAMPLES = 12  # images in a section
TWINS = 6  # clusters in a section, and images shown of each
MAX_CLUSTERS = 1000  # listed in the JSON file; the counts include all clusters
MAX_NAMES = 100  # listed of one cluster
MAX_BINS = 40
# The columns with a histogram, and whether its axis is logarithmic.
HISTOGRAMS = {
    "short_side": True, "long_side": True, "aspect": True, "megapixels": True, "bits_per_pixel": True,
    "brightness": False, "contrast": False, "colorfulness": False, "sharpness": True, "jpeg_quality": False,
    "clipped": False,
}  # fmt: skip
_VIEW = f"""
    CREATE OR REPLACE VIEW readable AS SELECT n, name, format, flags, bytes, width, height, stats.*,
        least(width, height) AS short_side, greatest(width, height) AS long_side, width / height AS aspect,
        width / 1e6 * height AS megapixels, bytes * 8 / (width::BIGINT * height) AS bits_per_pixel,
        list_has_any(flags, ['constant', 'near_blank']) AS is_blank
    FROM images WHERE reason IN ('', '{EXACT}')
"""


class Section(NamedTuple):
    """Example images on the page: which ones, and the text below each, in SQL."""

    note: str
    none_found: str
    where: str
    order: str
    caption: str


_SIZE = "width || ' x ' || height"
SECTIONS = {
    "A cross-section": Section("", "", "true", "hash(n)", _SIZE),
    "Largest": Section("By number of pixels.", "", "true", "megapixels DESC", _SIZE),
    "Smallest": Section("By the shorter side.", "", "true", "short_side", _SIZE),
    "Most elongated": Section(
        "One side is more than twice as long as the other.",
        "No image is more than twice as long as it is wide.",
        "long_side > 2 * short_side",
        "long_side / short_side DESC",
        _SIZE,
    ),
    "Most blurred": Section(
        "The least fine detail for their contrast; a deliberate blur counts too.",
        "Every image is blank.",
        "NOT is_blank",
        "sharpness",
        "format('sharpness {:.2g}', sharpness)",
    ),
    "Blank or nearly so": Section(
        "A standard deviation below 2 levels.",
        "No image is blank.",
        "is_blank",
        "contrast",
        "format('contrast {:.2g}', contrast)",
    ),
    "Most compressed": Section(
        "Estimated JPEG quality below 75.",
        "No JPEG has an estimated quality below 75.",
        "jpeg_quality < 75",
        "jpeg_quality",
        "format('JPEG quality {:.0f}', jpeg_quality)",
    ),
}


class Image(NamedTuple):
    """An image of a group."""

    n: int  # its number in the table
    name: str
    width: int
    height: int


Groups = dict[str, list[Image]]  # near duplicates by group, the largest image first; largest group first
Rows = list[list[tuple[int, str, str]]]  # of example images: (n, name, caption)


def near_groups(table: Table) -> Groups:
    """The groups of images that look alike, exact copies included."""
    return _groups(
        table,
        "SELECT f.grp AS g, i.n, i.name, i.width, i.height, i.bytes FROM images i JOIN images f ON "
        f"f.sha256 = i.sha256 AND f.reason = '' WHERE i.reason IN ('', '{EXACT}') AND f.grp IS NOT NULL",
    )


def exact_groups(table: Table) -> Groups:
    """Images with the same bytes."""
    return _groups(
        table,
        "SELECT sha256 AS g, n, name, width, height, bytes FROM images WHERE sha256 IN "
        f"(SELECT sha256 FROM images WHERE reason = '{EXACT}')",
    )


def _groups(table: Table, query: str) -> Groups:
    groups: Groups = {}
    order = f"ORDER BY count(*) OVER (PARTITION BY g) DESC, g, {LARGEST_FIRST}"
    for group, *image in table.all(f"SELECT g, n, name, width, height FROM ({query}) {order}"):
        groups.setdefault(group, []).append(Image(*image))
    return groups


def summarize(
    table: Table, near: Groups, input_dir: str, free_bytes: int
) -> tuple[dict[str, Any], dict[str, Rows]]:
    """The contents of the JSON file, and the example images of the page by heading."""
    table.run(_VIEW)
    exact = exact_groups(table)
    columns = {name: table.columns(f"SELECT {name}::DOUBLE AS v FROM readable")["v"] for name in HISTOGRAMS}
    values = {name: np.ma.filled(column, np.nan) for name, column in columns.items()}
    stats = {
        "input_dir": printable(str(input_dir)),
        "images": len(values["aspect"]),
        "rejected": {
            reason: {"count": count, "examples": [printable(name) for name, _ in table.examples(reason, 6)]}
            for reason, count in sorted(table.counts())
            if reason != EXACT
        },
        "formats": _by_count(table, "format"),
        "flags": _by_count(table, "unnest(flags)"),
        "resolutions": _resolutions(table),
        "space": {"free_bytes": free_bytes, **_numbers(
            table, bytes="sum(bytes)::BIGINT", bits_per_pixel="sum(bytes) * 8 / sum(width * height)",
            bytes_per_image="round(avg(bytes))::BIGINT",
        )},
        "channels": _numbers(  # with equal weight for each image; levels
            table,
            mean=_of_channels("avg(channel_means[c])"),
            std=_of_channels("sqrt(greatest(0, avg(channel_squares[c]) - avg(channel_means[c]) ** 2))"),
        ),
        "shapes": _numbers(  # square: one side is at most 5 % longer
            table,
            portrait="count(*) FILTER (aspect < 1 / 1.05)",
            square="count(*) FILTER (aspect BETWEEN 1 / 1.05 AND 1.05)",
            landscape="count(*) FILTER (aspect > 1.05)",
        ),
        "quantiles": {name: _quantiles(column) for name, column in values.items()},
        "histograms": {name: histogram(values[name], log) for name, log in HISTOGRAMS.items()},
        "exact_duplicates": _describe(exact),
        "near_duplicates": {**_describe(near), "groups": list(near)[:MAX_CLUSTERS]},
    }  # fmt: skip
    sections: dict[str, Rows] = {}
    for heading, one in SECTIONS.items():
        examples = table.all(
            f"SELECT n, name, {one.caption} FROM readable WHERE {one.where} ORDER BY {one.order}, n LIMIT ?",
            EXAMPLES,
        )
        sections[heading] = [examples] if examples else []
    for heading, groups in (("Exact duplicates", exact), ("Near duplicates", near)):
        sections[heading] = [
            [(image.n, image.name, f"{image.width} x {image.height}") for image in images[:TWINS]]
            for images in list(groups.values())[:TWINS]
        ]
    return stats, sections


def _numbers(table: Table, **expressions: str) -> dict[str, Any]:
    """The values of some aggregates over all readable images."""
    row = table.all(f"SELECT {', '.join(expressions.values())} FROM readable")[0]
    return dict(zip(expressions, row, strict=True))


def _of_channels(aggregate: str) -> str:
    return "[" + ", ".join(f"round({aggregate.replace('[c]', f'[{c}]')}, 3)" for c in (1, 2, 3)) + "]"


def _by_count(table: Table, value: str) -> dict[str, int]:
    values = f"SELECT {value} AS v FROM readable"
    query = f"SELECT v, count(*) AS c FROM ({values}) GROUP BY v ORDER BY c DESC, v"
    return {str(name): count for name, count in table.all(query)}


def _resolutions(table: Table) -> list[dict[str, Any]]:
    """Images that can be cropped at each image size without enlarging, and the space they would need."""
    return [
        {"image_size": size} | _numbers(
            table,
            images=f"count(*) FILTER (short_side >= {size})",
            share=f"round(avg((short_side >= {size})::INTEGER), 6)",
            bytes_when_reduced=f"round(coalesce(sum(long_side / short_side) FILTER (short_side >= {size}), 0)"
            f" * {size * size} * median(bits_per_pixel) / 8)::BIGINT",
        )
        for size in RESOLUTIONS
    ]  # fmt: skip


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles; None if no image has the value."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return dict.fromkeys(["mean", *QUANTILES])
    quantiles = np.percentile(values, list(QUANTILES.values()))
    return {
        name: float(f"{value:.6g}")
        for name, value in zip(["mean", *QUANTILES], [values.mean(), *quantiles], strict=True)
    }


def histogram(values: np.ndarray, log: bool) -> dict[str, Any]:
    """Counts between edges; `log`: edges at equal ratios. NaN, and 0 if `log`, are counted as left out."""
    number = len(values)
    values = values[np.isfinite(values)]
    if log:
        values = values[values > 0]
    if len(values) == 0:
        return {"log": log, "edges": [], "counts": [], "left_out": number}
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(high), 1.0):
        low, high = (low / 1.1, high * 1.1) if log else (low - 0.5, high + 0.5)
    bins = int(np.clip(2 * len(values) ** (1 / 3), 8, MAX_BINS))  # Rice's rule
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high  # rounding must exclude no image
    counts, _ = np.histogram(values, edges)
    return {
        "log": log,
        "edges": [float(f"{edge:.6g}") for edge in edges],
        "counts": counts.tolist(),
        "left_out": number - len(values),
    }


def _describe(groups: Groups) -> dict[str, Any]:
    clusters = list(groups.values())
    return {
        "clusters": len(clusters),
        "images": sum(map(len, clusters)),
        "superfluous": sum(len(images) - 1 for images in clusters),
        "names": [
            [printable(image.name) for image in images[:MAX_NAMES]] for images in clusters[:MAX_CLUSTERS]
        ],
    }
