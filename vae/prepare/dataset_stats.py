"""Statistics of a set from the measurements of its images: numbers, histograms and example images.

Shapes: N images that could be read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vae.config.recipes import RECIPES
from vae.prepare.selection import LARGEST_FIRST
from vae.prepare.table import Table
from vae.system.console import printable

# Image sizes of the profiles, in px, without the 128 px of the demo.
RESOLUTIONS = sorted({recipe.values["image_size"] for name, recipe in RECIPES.items() if name != "demo"})
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)  # percent
EXAMPLES = 12  # images in a section
TWINS = 6  # clusters in a section, and images shown of each
MAX_CLUSTERS = 1000  # listed in the JSON file; the counts include all clusters
MAX_NAMES = 100  # listed of one cluster
MAX_BINS = 40
SCALARS = ("brightness", "contrast", "colorfulness", "sharpness", "clipped")  # of PixelStats
# The columns with a histogram, and whether its axis is logarithmic.
HISTOGRAMS = {
    "short_side": True, "long_side": True, "aspect": True, "megapixels": True, "bits_per_pixel": True,
    "brightness": False, "contrast": False, "colorfulness": False, "sharpness": True, "jpeg_quality": False,
    "clipped": False,
}  # fmt: skip
CHANNELS = ("channel_means", "channel_squares")  # 24 bytes per image each
BLANK = frozenset(("constant", "near_blank"))
Columns = dict[str, np.ndarray]
Rows = list[list[tuple[int, str, str]]]  # of example images: (n, name, caption)
Sections = dict[str, Rows]  # by heading
READABLE = "reason IN ('', 'exact_duplicate')"


class Image(NamedTuple):
    """An image of a group."""

    n: int  # its number in the table
    name: str
    width: int
    height: int


Groups = dict[str, list[Image]]  # near duplicates by group, the largest image first; largest group first


def near_groups(table: Table) -> Groups:
    """The groups of images that look alike, exact copies included."""
    return _groups(
        table,
        "SELECT coalesce(i.grp, f.grp) AS g, i.n, i.name, i.width, i.height, i.bytes FROM images i LEFT JOIN "
        "images f "
        f"ON f.sha256 = i.sha256 AND f.reason = '' WHERE i.{READABLE} AND coalesce(i.grp, f.grp) IS NOT NULL",
    )


def exact_groups(table: Table) -> Groups:
    """Images with the same bytes."""
    return _groups(
        table,
        "SELECT sha256 AS g, n, name, width, height, bytes FROM images WHERE sha256 IN "
        "(SELECT sha256 FROM images WHERE reason = 'exact_duplicate')",
    )


def _groups(table: Table, query: str) -> Groups:
    groups: Groups = {}
    order = f"ORDER BY count(*) OVER (PARTITION BY g) DESC, g, {LARGEST_FIRST}"
    for group, n, name, width, height in table.all(
        f"SELECT g, n, name, width, height FROM ({query}) {order}"
    ):
        groups.setdefault(group, []).append(Image(n, name, width, height))
    return groups


def summarize(table: Table, near: Groups, input_dir: str, free_bytes: int) -> tuple[dict[str, Any], Sections]:
    """The contents of the JSON file, and the example images of the page; duplicates are known."""
    columns, exact, clusters = _columns(table), list(exact_groups(table).values()), list(near.values())
    stats = {
        "input_dir": printable(str(input_dir)),
        "images": len(columns["bytes"]),
        "rejected": {
            reason: {"count": count, "examples": [printable(name) for name, _ in table.examples(reason, 6)]}
            for reason, count in sorted(table.counts())
            if reason != "exact_duplicate"
        },
        "formats": _by_count(table, "format"),
        "flags": _by_count(table, "unnest(flags)"),
        "resolutions": _resolutions(columns),
        "space": _space(columns, free_bytes),
        "channels": _channels(columns),
        "shapes": _shapes(columns["aspect"]),
        "quantiles": {name: _quantiles(columns[name]) for name in HISTOGRAMS},
        "histograms": {name: histogram(columns[name], log) for name, log in HISTOGRAMS.items()},
        "exact_duplicates": _describe_clusters(exact),
        "near_duplicates": {**_describe_clusters(clusters), "groups": list(near)[:MAX_CLUSTERS]},
    }
    return stats, _sections(table, columns, exact, clusters)


def _columns(table: Table) -> Columns:
    """The numbers of each image that can be read, and those that follow from its size: (N,) or (N, 3)."""
    values = [f"TRY_CAST(stats ->> '$.{name}' AS DOUBLE) AS {name}" for name in (*SCALARS, "jpeg_quality")]
    values += [
        f"TRY_CAST(stats ->> '$.{name}[{channel}]' AS DOUBLE) AS {name}_{channel}"
        for name in CHANNELS
        for channel in range(3)
    ]
    found = table.columns(
        "SELECT n, bytes::DOUBLE AS bytes, width::DOUBLE AS width, height::DOUBLE AS height, "
        f"{', '.join(values)}, "
        f"list_has_any(flags, {list(BLANK)!r}) AS is_blank FROM images WHERE {READABLE} ORDER BY n"
    )
    columns: Columns = {}
    for name, column in found.items():
        values_of = (
            np.ma.filled(column.astype(np.float64), np.nan) if name not in ("n", "is_blank") else column
        )
        columns[name] = np.asarray(values_of)
    for name in CHANNELS:
        columns[name] = np.stack([columns[f"{name}_{channel}"] for channel in range(3)], axis=1)
    columns["is_blank"] = columns["is_blank"].astype(bool)
    width, height = columns["width"], columns["height"]
    columns["pixels"] = pixels = width * height
    columns["short_side"], columns["long_side"] = np.minimum(width, height), np.maximum(width, height)
    columns["aspect"], columns["megapixels"] = width / height, pixels / 1e6
    columns["bits_per_pixel"] = columns["bytes"] * 8 / pixels
    return columns


def _by_count(table: Table, value: str) -> dict[str, int]:
    values = f"SELECT {value} AS v FROM images WHERE {READABLE}"
    query = f"SELECT v, count(*) AS c FROM ({values}) GROUP BY v ORDER BY c DESC, v"
    return {str(name): count for name, count in table.all(query)}


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles; None if no image has the value."""
    values = values[np.isfinite(values)].astype(np.float64)
    names = ["min", *(f"p{percent}" for percent in QUANTILES[1:-1]), "max"]
    if len(values) == 0:
        return dict.fromkeys(["mean", *names])
    quantiles = np.percentile(values, QUANTILES)
    return {
        name: float(f"{value:.6g}")
        for name, value in zip(["mean", *names], [values.mean(), *quantiles], strict=True)
    }


def histogram(values: np.ndarray, log: bool) -> dict[str, Any]:
    """Counts between edges; `log`: edges at equal ratios. NaN, and 0 if `log`, are counted as left out."""
    number = len(values)
    values = values[np.isfinite(values)].astype(np.float64)
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


def _resolutions(columns: Columns) -> list[dict[str, Any]]:
    """Images that can be cropped at each image size without enlarging, and the space they would need."""
    resolutions = []
    bits = float(np.median(columns["bits_per_pixel"]))
    for size in RESOLUTIONS:
        fits = columns["short_side"] >= size
        long_sides = columns["long_side"][fits] / columns["short_side"][fits] * size
        resolutions.append(
            {
                "image_size": size,
                "images": int(fits.sum()),
                "share": round(float(fits.mean()), 6),
                "bytes_when_reduced": round(float(long_sides.sum()) * size * bits / 8),
            }
        )
    return resolutions


def _space(columns: Columns, free_bytes: int) -> dict[str, Any]:
    total = int(columns["bytes"].sum())
    return {
        "bytes": total,
        "free_bytes": free_bytes,
        "bits_per_pixel": float(f"{total * 8 / columns['pixels'].sum():.4g}"),
        "bytes_per_image": round(total / len(columns["bytes"])),
    }


def _channels(columns: Columns) -> dict[str, list[float]]:
    """Mean and standard deviation of red, green and blue, with equal weight for each image; levels."""
    mean, squares = (columns[name].mean(axis=0) for name in CHANNELS)  # (3,)
    spread = np.sqrt(np.maximum(squares - mean**2, 0))
    return {"mean": mean.round(3).tolist(), "std": spread.round(3).tolist()}


def _shapes(aspect: np.ndarray) -> dict[str, int]:
    square = np.abs(np.log(aspect)) <= np.log(1.05)  # one side at most 5 % longer
    return {
        "portrait": int((~square & (aspect < 1)).sum()),
        "square": int(square.sum()),
        "landscape": int((~square & (aspect > 1)).sum()),
    }


def _describe_clusters(clusters: list[list[Image]]) -> dict[str, Any]:
    return {
        "clusters": len(clusters),
        "images": sum(map(len, clusters)),
        "superfluous": sum(len(images) - 1 for images in clusters),
        "names": [
            [printable(image.name) for image in images[:MAX_NAMES]] for images in clusters[:MAX_CLUSTERS]
        ],
    }


def _sections(table: Table, columns: Columns, exact: list[list[Image]], near: list[list[Image]]) -> Sections:
    count = len(columns["bytes"])
    everything = np.arange(count)
    sharp, contrast, quality = columns["sharpness"], columns["contrast"], columns["jpeg_quality"]
    elongation = np.abs(np.log(columns["aspect"]))

    def size(at: int) -> str:
        return f"{columns['width'][at]:.0f} x {columns['height'][at]:.0f}"

    def lowest(values: np.ndarray, among: np.ndarray) -> np.ndarray:
        among = among[np.isfinite(values[among])]
        return among[np.argsort(values[among], kind="stable")[:EXAMPLES]]

    def twins(clusters: list[list[Image]]) -> Rows:
        return [
            [(one.n, one.name, f"{one.width} x {one.height}") for one in some[:TWINS]]
            for some in clusters[:TWINS]
        ]

    long, low_quality = np.flatnonzero(elongation > np.log(2)), np.flatnonzero(quality < 75)
    blank, detailed = np.flatnonzero(columns["is_blank"]), np.flatnonzero(~columns["is_blank"])
    chosen: dict[str, tuple[np.ndarray, Callable[[int], str]]] = {
        "A cross-section": (everything[:: max(1, count // EXAMPLES)][:EXAMPLES], size),
        "Largest": (lowest(-columns["megapixels"], everything), size),
        "Smallest": (lowest(columns["short_side"], everything), size),
        "Most elongated": (lowest(-elongation, long), size),
        "Most blurred": (lowest(sharp, detailed), lambda at: f"sharpness {sharp[at]:.2g}"),
        "Blank or nearly so": (lowest(contrast, blank), lambda at: f"contrast {contrast[at]:.2g}"),
        "Most compressed": (lowest(quality, low_quality), lambda at: f"JPEG quality {quality[at]:.0f}"),
    }
    wanted = {int(columns["n"][at]) for positions, _ in chosen.values() for at in positions.tolist()}
    with table.arrays("wanted", n=np.array(sorted(wanted), np.int64)):
        names = dict(table.all("SELECT n, name FROM images JOIN wanted USING (n)"))
    numbers = columns["n"].tolist()
    sections = {
        heading: [[(numbers[at], names[numbers[at]], caption(at)) for at in positions.tolist()]]
        if len(positions)
        else []
        for heading, (positions, caption) in chosen.items()
    }
    return sections | {"Exact duplicates": twins(exact), "Near duplicates": twins(near)}
