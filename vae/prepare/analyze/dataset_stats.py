"""Statistics of a set from the measurements of its images: numbers, histograms and example images.

Shapes: N images that could be read.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vae.config.recipes import RECIPES
from vae.prepare.fingerprints import Fingerprint
from vae.prepare.near_duplicate_groups import largest_first, near_duplicate_groups
from vae.system.console import printable

# Image sizes of the profiles, in px, without the 128 px of the demo.
RESOLUTIONS = sorted({recipe.values["image_size"] for name, recipe in RECIPES.items() if name != "demo"})
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)  # percent
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
Rows = list[list[tuple[str, str]]]  # of example images: (name, caption)
Sections = dict[str, Rows]  # by heading


@dataclass
class Collected:
    """Measurements of all images that could be read: about 1 KB per image with its name and fingerprint."""

    names: list[str]
    columns: dict[str, np.ndarray]  # (N,) by name, among them width, height and bytes
    contents: np.ndarray  # S64 (N,): SHA-256
    fingerprints: dict[str, Fingerprint]  # by SHA-256
    blank: np.ndarray  # bool (N,)
    channel_means: np.ndarray  # (3,), levels
    channel_squares: np.ndarray  # (3,), levels squared
    formats: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, list[str]] = field(default_factory=dict)  # names by reason


def near_groups(collected: Collected) -> dict[str, list[int]]:
    """Positions of near duplicates by group, the largest image first; largest group first."""
    groups = near_duplicate_groups(collected.fingerprints)
    positions: dict[str, list[int]] = defaultdict(list)
    for at, content in enumerate(collected.contents.tolist()):
        if group := groups.get(content.decode()):
            positions[group].append(at)
    sizes = np.stack(
        [collected.columns[name].astype(np.int64) for name in ("width", "height", "bytes")], axis=1
    )
    for part in positions.values():
        part.sort(key=lambda at: largest_first(collected.names[at], *sizes[at].tolist()))
    return dict(sorted(positions.items(), key=lambda item: (-len(item[1]), item[0])))


def summarize(
    collected: Collected, near: dict[str, list[int]], input_dir: str
) -> tuple[dict[str, Any], Sections]:
    """The contents of the JSON file, and the example images of the page."""
    columns = _derived_columns(collected)
    exact = _clusters(_same(collected.contents))
    stats = {
        "input_dir": printable(str(input_dir)),
        "images": len(collected.names),
        "rejected": {
            reason: {"count": len(names), "examples": [printable(name) for name in names[:5]]}
            for reason, names in sorted(collected.rejected.items())
        },
        "formats": _by_count(collected.formats),
        "flags": _by_count(collected.flags),
        "resolutions": _resolutions(columns),
        "space": _space(columns, input_dir),
        "channels": _channels(collected),
        "shapes": _shapes(columns["aspect"]),
        "quantiles": {name: _quantiles(columns[name]) for name in HISTOGRAMS},
        "histograms": {name: histogram(columns[name], log) for name, log in HISTOGRAMS.items()},
        "exact_duplicates": _describe_clusters(exact, collected.names),
        "near_duplicates": {
            **_describe_clusters(list(near.values()), collected.names),
            "groups": list(near)[:MAX_CLUSTERS],
        },
    }
    return stats, _sections(collected, columns, exact, list(near.values()))


def _derived_columns(collected: Collected) -> dict[str, np.ndarray]:
    """The measured columns and those that follow from width, height and bytes."""
    columns = dict(collected.columns)
    width, height = (columns[side].astype(np.float64) for side in ("width", "height"))
    pixels = width * height
    columns["short_side"], columns["long_side"] = np.minimum(width, height), np.maximum(width, height)
    columns["aspect"], columns["megapixels"] = width / height, pixels / 1e6
    columns["bits_per_pixel"] = columns["bytes"] * 8 / pixels
    return columns


def _by_count(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


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


def _resolutions(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
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


def _space(columns: dict[str, np.ndarray], input_dir: str) -> dict[str, Any]:
    total = int(columns["bytes"].sum())
    pixels = float((columns["width"].astype(np.float64) * columns["height"]).sum())
    return {
        "bytes": total,
        "free_bytes": shutil.disk_usage(input_dir).free,
        "bits_per_pixel": float(f"{total * 8 / pixels:.4g}"),
        "bytes_per_image": round(total / len(columns["bytes"])),
    }


def _channels(collected: Collected) -> dict[str, list[float]]:
    """Mean and standard deviation of red, green and blue, with equal weight for each image; levels."""
    spread = np.sqrt(np.maximum(collected.channel_squares - collected.channel_means**2, 0))
    return {"mean": collected.channel_means.round(3).tolist(), "std": spread.round(3).tolist()}


def _shapes(aspect: np.ndarray) -> dict[str, int]:
    square = np.abs(np.log(aspect)) <= np.log(1.05)  # one side at most 5 % longer
    return {
        "portrait": int((~square & (aspect < 1)).sum()),
        "square": int(square.sum()),
        "landscape": int((~square & (aspect > 1)).sum()),
    }


def _same(values: np.ndarray) -> np.ndarray:
    """The position of the first equal value: int64 (N,)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse]


def _clusters(first: np.ndarray) -> list[list[int]]:
    """Positions of images with the same first one, for each cluster; largest cluster first."""
    order = np.argsort(first, kind="stable")
    starts = np.flatnonzero(np.diff(first[order], prepend=-1))
    parts = [part for part in np.split(order, starts[1:]) if len(part) > 1]
    return sorted((part.tolist() for part in parts), key=lambda part: (-len(part), part[0]))


def _describe_clusters(clusters: list[list[int]], names: list[str]) -> dict[str, Any]:
    return {
        "clusters": len(clusters),
        "images": sum(map(len, clusters)),
        "superfluous": sum(len(part) - 1 for part in clusters),
        "names": [[printable(names[at]) for at in part[:MAX_NAMES]] for part in clusters[:MAX_CLUSTERS]],
    }


def _sections(
    collected: Collected,
    columns: dict[str, np.ndarray],
    exact: list[list[int]],
    near: list[list[int]],
) -> Sections:
    names = collected.names
    everything = np.arange(len(names))
    sharp, contrast, quality = columns["sharpness"], columns["contrast"], columns["jpeg_quality"]
    elongation = np.abs(np.log(columns["aspect"]))

    def size(at: int) -> str:
        return f"{int(columns['width'][at])} x {int(columns['height'][at])}"

    def lowest(values: np.ndarray, among: np.ndarray, caption: Callable[[int], str]) -> Rows:
        among = among[np.isfinite(values[among])]
        chosen = among[np.argsort(values[among], kind="stable")[:EXAMPLES]]
        return [[(names[at], caption(at)) for at in chosen.tolist()]] if len(chosen) else []

    def twins(clusters: list[list[int]]) -> Rows:
        return [[(names[at], size(at)) for at in part[:TWINS]] for part in clusters[:TWINS]]

    step = max(1, len(names) // EXAMPLES)
    long, low_quality = np.flatnonzero(elongation > np.log(2)), np.flatnonzero(quality < 75)
    blank, detailed = np.flatnonzero(collected.blank), np.flatnonzero(~collected.blank)
    return {
        "A cross-section": [[(names[at], size(at)) for at in range(0, len(names), step)][:EXAMPLES]],
        "Largest": lowest(-columns["megapixels"], everything, size),
        "Smallest": lowest(columns["short_side"], everything, size),
        "Most elongated": lowest(-elongation, long, size),
        "Most blurred": lowest(sharp, detailed, lambda at: f"sharpness {sharp[at]:.2g}"),
        "Blank or nearly so": lowest(contrast, blank, lambda at: f"contrast {contrast[at]:.2g}"),
        "Most compressed": lowest(quality, low_quality, lambda at: f"JPEG quality {quality[at]:.0f}"),
        "Exact duplicates": twins(exact),
        "Near duplicates": twins(near),
    }
