"""Statistics of a set from the measurements of its images: numbers, histograms and example images.

Shapes: N images that could be read.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from vae.config.recipes import RECIPES
from vae.prepare.analyze.measure_file import Measurement
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
SCALARS = ("brightness", "contrast", "colorfulness", "sharpness", "clipped")  # of PixelStats
# The columns with a histogram, and whether its axis is logarithmic.
HISTOGRAMS = {
    "short_side": True, "long_side": True, "aspect": True, "megapixels": True, "bits_per_pixel": True,
    "brightness": False, "contrast": False, "colorfulness": False, "sharpness": True, "jpeg_quality": False,
    "clipped": False,
}  # fmt: skip
Measured = dict[str, Measurement]  # by name, sorted: about 2 KB per image
Rows = list[list[tuple[str, str]]]  # of example images: (name, caption)
Sections = dict[str, Rows]  # by heading


def near_groups(measured: Measured) -> dict[str, list[str]]:
    """Names of near duplicates by group, the largest image first; largest group first."""
    groups = near_duplicate_groups({image.sha256: image.fingerprint for image in measured.values()})
    members: dict[str, list[str]] = defaultdict(list)
    for name, image in measured.items():
        if group := groups.get(image.sha256):
            members[group].append(name)

    def key(name: str) -> tuple[int, int, bytes]:
        image = measured[name]
        return largest_first(name, image.width, image.height, image.file_bytes)

    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    return {group: sorted(names, key=key) for group, names in ordered}


def summarize(
    measured: Measured, rejected: dict[str, list[str]], near: dict[str, list[str]], input_dir: str
) -> tuple[dict[str, Any], Sections]:
    """The contents of the JSON file, and the example images of the page; `rejected`: names by reason."""
    columns, exact, clusters = _columns(measured), _exact_copies(measured), list(near.values())
    stats = {
        "input_dir": printable(str(input_dir)),
        "images": len(measured),
        "rejected": {
            reason: {"count": len(names), "examples": [printable(name) for name in names[:5]]}
            for reason, names in sorted(rejected.items())
        },
        "formats": _by_count(Counter(image.format for image in measured.values())),
        "flags": _by_count(Counter(flag for image in measured.values() for flag in image.flags)),
        "resolutions": _resolutions(columns),
        "space": _space(columns, input_dir),
        "channels": _channels(measured),
        "shapes": _shapes(columns["aspect"]),
        "quantiles": {name: _quantiles(columns[name]) for name in HISTOGRAMS},
        "histograms": {name: histogram(columns[name], log) for name, log in HISTOGRAMS.items()},
        "exact_duplicates": _describe_clusters(exact),
        "near_duplicates": {**_describe_clusters(clusters), "groups": list(near)[:MAX_CLUSTERS]},
    }
    return stats, _sections(measured, columns, exact, clusters)


def _columns(measured: Measured) -> dict[str, np.ndarray]:
    """The numbers of each image, and those that follow from width, height and bytes: float64 (N,)."""
    images = measured.values()
    columns = {name: np.array([getattr(image.pixel_stats, name) for image in images]) for name in SCALARS}
    columns["jpeg_quality"] = np.array([image.jpeg_quality for image in images])
    columns["bytes"] = np.array([image.file_bytes for image in images], np.float64)
    width, height = np.array([(image.width, image.height) for image in images], np.float64).T
    columns["pixels"] = pixels = width * height
    columns["short_side"], columns["long_side"] = np.minimum(width, height), np.maximum(width, height)
    columns["aspect"], columns["megapixels"] = width / height, pixels / 1e6
    columns["bits_per_pixel"] = columns["bytes"] * 8 / pixels
    return columns


def _exact_copies(measured: Measured) -> list[list[str]]:
    """Names of images with the same bytes, for each cluster; largest cluster first."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, image in measured.items():
        names_of[image.sha256].append(name)
    clusters = [names for names in names_of.values() if len(names) > 1]
    return sorted(clusters, key=lambda names: (-len(names), names[0]))


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
    return {
        "bytes": total,
        "free_bytes": shutil.disk_usage(input_dir).free,
        "bits_per_pixel": float(f"{total * 8 / columns['pixels'].sum():.4g}"),
        "bytes_per_image": round(total / len(columns["bytes"])),
    }


def _channels(measured: Measured) -> dict[str, list[float]]:
    """Mean and standard deviation of red, green and blue, with equal weight for each image; levels."""
    stats = [image.pixel_stats for image in measured.values()]
    mean = np.mean([image.channel_means for image in stats], axis=0)  # (3,)
    squares = np.mean([image.channel_squares for image in stats], axis=0)
    spread = np.sqrt(np.maximum(squares - mean**2, 0))
    return {"mean": mean.round(3).tolist(), "std": spread.round(3).tolist()}


def _shapes(aspect: np.ndarray) -> dict[str, int]:
    square = np.abs(np.log(aspect)) <= np.log(1.05)  # one side at most 5 % longer
    return {
        "portrait": int((~square & (aspect < 1)).sum()),
        "square": int(square.sum()),
        "landscape": int((~square & (aspect > 1)).sum()),
    }


def _describe_clusters(clusters: list[list[str]]) -> dict[str, Any]:
    return {
        "clusters": len(clusters),
        "images": sum(map(len, clusters)),
        "superfluous": sum(len(names) - 1 for names in clusters),
        "names": [[printable(name) for name in names[:MAX_NAMES]] for names in clusters[:MAX_CLUSTERS]],
    }


def _sections(
    measured: Measured, columns: dict[str, np.ndarray], exact: list[list[str]], near: list[list[str]]
) -> Sections:
    names = list(measured)
    everything = np.arange(len(names))
    sharp, contrast, quality = columns["sharpness"], columns["contrast"], columns["jpeg_quality"]
    elongation = np.abs(np.log(columns["aspect"]))

    def sized(name: str) -> tuple[str, str]:
        return name, f"{measured[name].width} x {measured[name].height}"

    def size(at: int) -> str:
        return sized(names[at])[1]

    def lowest(values: np.ndarray, among: np.ndarray, caption: Callable[[int], str]) -> Rows:
        among = among[np.isfinite(values[among])]
        chosen = among[np.argsort(values[among], kind="stable")[:EXAMPLES]]
        return [[(names[at], caption(at)) for at in chosen.tolist()]] if len(chosen) else []

    def twins(clusters: list[list[str]]) -> Rows:
        return [[sized(name) for name in cluster[:TWINS]] for cluster in clusters[:TWINS]]

    is_blank = np.array([bool({"constant", "near_blank"} & set(image.flags)) for image in measured.values()])
    step = max(1, len(names) // EXAMPLES)
    long, low_quality = np.flatnonzero(elongation > np.log(2)), np.flatnonzero(quality < 75)
    blank, detailed = np.flatnonzero(is_blank), np.flatnonzero(~is_blank)
    return {
        "A cross-section": [[sized(name) for name in names[::step][:EXAMPLES]]],
        "Largest": lowest(-columns["megapixels"], everything, size),
        "Smallest": lowest(columns["short_side"], everything, size),
        "Most elongated": lowest(-elongation, long, size),
        "Most blurred": lowest(sharp, detailed, lambda at: f"sharpness {sharp[at]:.2g}"),
        "Blank or nearly so": lowest(contrast, blank, lambda at: f"contrast {contrast[at]:.2g}"),
        "Most compressed": lowest(quality, low_quality, lambda at: f"JPEG quality {quality[at]:.0f}"),
        "Exact duplicates": twins(exact),
        "Near duplicates": twins(near),
    }
