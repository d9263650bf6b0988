"""Statistics of a set from the measurements of its images: numbers, histograms and example images.

Shapes: N images that could be read.
"""

import math
import shutil
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.config.recipes import RECIPES
from vae.prepare.fingerprints import Fingerprint, from_text
from vae.prepare.ledger import ACCEPTED, DUPLICATE, REJECTED, Ledger, Result
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
COLUMNS = (*SCALARS, "jpeg_quality", "width", "height")  # of a record, 8 bytes per image each
CHANNELS = ("channel_means", "channel_squares")  # 24 bytes per image each
BLANK = frozenset(("constant", "near_blank"))
Columns = dict[str, np.ndarray]
Rows = list[list[tuple[str, str]]]  # of example images: (name, caption)
Sections = dict[str, Rows]  # by heading


class Image(NamedTuple):
    """An image of a group."""

    name: str
    width: int
    height: int
    bytes: int


Groups = dict[str, list[Image]]  # near duplicates by group, the largest image first; largest group first


def fingerprints_of(ledger: Ledger) -> Iterator[tuple[str, Fingerprint]]:
    """The fingerprints of all images with different bytes, sorted by the SHA-256 of the file."""
    for result in ledger.accepted_by_hash():
        fingerprint = from_text(result.record["fingerprint"])
        assert fingerprint is not None, "measure_image has written it"
        yield str(result.sha256), fingerprint


def near_groups(ledger: Ledger, folder: Path) -> Groups:
    """The groups of near duplicates; `folder` is for large files meanwhile."""
    group_of = near_duplicate_groups(fingerprints_of(ledger), folder)
    groups: Groups = defaultdict(list)
    for result in _images(ledger):
        if group := group_of.get(str(result.sha256)):
            groups[group].append(_image(result))
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {group: sorted(images, key=lambda image: largest_first(*image)) for group, images in ordered}


def summarize(ledger: Ledger, near: Groups, input_dir: str) -> tuple[dict[str, Any], Sections]:
    """The contents of the JSON file, and the example images of the page; exact duplicates are settled."""
    formats, flags = Counter[str](), Counter[str]()
    columns, exact, clusters = _columns(ledger, formats, flags), _exact_copies(ledger), list(near.values())
    stats = {
        "input_dir": printable(str(input_dir)),
        "images": len(columns["bytes"]),
        "rejected": {
            reason: {
                "count": count,
                "examples": [printable(result.name) for result in ledger.rejected_examples(reason)],
            }
            for reason, count in sorted(ledger.counts(REJECTED))
        },
        "formats": _by_count(formats),
        "flags": _by_count(flags),
        "resolutions": _resolutions(columns),
        "space": _space(columns, input_dir),
        "channels": _channels(columns),
        "shapes": _shapes(columns["aspect"]),
        "quantiles": {name: _quantiles(columns[name]) for name in HISTOGRAMS},
        "histograms": {name: histogram(columns[name], log) for name, log in HISTOGRAMS.items()},
        "exact_duplicates": _describe_clusters(exact),
        "near_duplicates": {**_describe_clusters(clusters), "groups": list(near)[:MAX_CLUSTERS]},
    }
    return stats, _sections(ledger, columns, exact, clusters)


def _images(ledger: Ledger) -> Iterator[Result]:
    """The results of all images that could be read, in the order of names."""
    return ledger.results(ACCEPTED, DUPLICATE)


def _image(result: Result) -> Image:
    return Image(result.name, result.record["width"], result.record["height"], result.size)


def _columns(ledger: Ledger, formats: Counter[str], flags: Counter[str]) -> Columns:
    """The numbers of each image, and those that follow from width, height and bytes: float64 (N,) or (N, 3).

    Counts formats and flags.
    """
    values = array("d")
    for result in _images(ledger):
        record = result.record
        formats[record["format"]] += 1
        flags.update(record["flags"])
        values.extend(math.nan if record[name] is None else record[name] for name in COLUMNS)
        values.extend(value for name in CHANNELS for value in record[name])
        values.extend((result.size, not BLANK.isdisjoint(record["flags"])))
    table = np.frombuffer(values).reshape(-1, len(COLUMNS) + 3 * len(CHANNELS) + 2)
    columns: Columns = {name: table[:, at] for at, name in enumerate(COLUMNS)}
    for number, name in enumerate(CHANNELS):
        columns[name] = table[:, len(COLUMNS) + 3 * number :][:, :3]
    columns["bytes"], columns["is_blank"] = table[:, -2], table[:, -1] == 1
    width, height = columns["width"], columns["height"]
    columns["pixels"] = pixels = width * height
    columns["short_side"], columns["long_side"] = np.minimum(width, height), np.maximum(width, height)
    columns["aspect"], columns["megapixels"] = width / height, pixels / 1e6
    columns["bits_per_pixel"] = columns["bytes"] * 8 / pixels
    return columns


def _exact_copies(ledger: Ledger) -> list[list[Image]]:
    """Images with the same bytes, for each cluster; largest cluster first."""
    clusters: dict[str, list[Image]] = {}
    for result in ledger.results(DUPLICATE):
        content = str(result.sha256)
        if content not in clusters:
            first = ledger.accepted_with_hash(content)
            assert first is not None, "it is a duplicate of an accepted file"
            clusters[content] = [_image(first)]
        clusters[content].append(_image(result))
    return sorted(clusters.values(), key=lambda images: (-len(images), images[0].name))


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


def _space(columns: Columns, input_dir: str) -> dict[str, Any]:
    total = int(columns["bytes"].sum())
    return {
        "bytes": total,
        "free_bytes": shutil.disk_usage(input_dir).free,
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


def _sections(
    ledger: Ledger, columns: Columns, exact: list[list[Image]], near: list[list[Image]]
) -> Sections:
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
            [(one.name, f"{one.width} x {one.height}") for one in some[:TWINS]] for some in clusters[:TWINS]
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
    wanted = {at for positions, _ in chosen.values() for at in positions.tolist()}
    names = {at: result.name for at, result in enumerate(_images(ledger)) if at in wanted}
    sections = {
        heading: [[(names[at], caption(at)) for at in positions.tolist()]] if len(positions) else []
        for heading, (positions, caption) in chosen.items()
    }
    return sections | {"Exact duplicates": twins(exact), "Near duplicates": twins(near)}
