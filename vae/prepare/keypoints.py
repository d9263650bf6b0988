"""Keypoints of an image: blobs that another crop of the photograph has too, with a hash of each.

A blob is an extremum of differences of Gaussians over position and scale (Lowe 2004, "Distinctive image
features from scale-invariant keypoints", sections 3 and 4). Its hash contains the signs of the 64 lowest
frequencies of the brightness around it, so it does not change with brightness, contrast and scale.

Shapes: h, w are the sides of the reduced image; K keypoints.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from vae.prepare.perceptual_hash import lowest_frequencies

SIDE = 192  # px: images are reduced to SIDE^2 pixels; at 256 the same keypoints take twice the time
MOST = 48  # keypoints of one image, the strongest
SIGMA, SCALES = 1.6, 3  # px, and scales per octave: Lowe 2004, section 3.3
CAMERA_SIGMA = 0.5  # px: the blur that an image has already; Lowe 2004, section 3.3
MIN_CONTRAST = 1.0  # levels of a difference of Gaussians; below it are noise and JPEG blocks
EDGE_RATIO = 10.0  # of the curvatures along and across: Lowe 2004, section 4.1
WINDOW = 12.0  # sides of the hashed window, in sigmas of the blob; 8 and 16 found fewer crops
OUTSIDE = 0.125  # share of the window's side that may be outside the image
GRID = 16  # samples per side of the window
SMALLEST = 24  # px: a smaller octave has no room for a window
STORED = np.dtype([("hash", "<u8"), ("x", "u1"), ("y", "u1"), ("scale", "u1")])  # 11 bytes
SCALE_STEPS = 32  # of the stored scale, per octave
HEADER = struct.Struct("<fB")  # width / height, and K


class Keypoints(NamedTuple):
    """The keypoints of an image; lengths are in units of the square root of its area."""

    sides: np.ndarray  # float32 (2,): width, height
    hashes: np.ndarray  # uint64 (K,)
    places: np.ndarray  # float32 (K, 3): x, y, log2 of the blob's size in px of the reduced image


_COSINES, _DOWN, _RIGHT = lowest_frequencies(GRID, 64)
# In the mirrored image, a keypoint has the opposite sign at the odd frequencies along x.
MIRROR = np.packbits(_RIGHT % 2 == 1).view(">u8").astype(np.uint64)[0]


def find_keypoints(image: Image.Image) -> bytes:
    """The strongest keypoints of an image, packed in 5 + 11 K bytes; `unpack` reads them."""
    grey = _reduce(image)
    height, width = grey.shape
    found = [np.zeros((0, 5))]
    hashes = [np.zeros(0, np.uint64)]
    for step, levels in _octaves(grey):
        for index in range(1, SCALES + 1):
            blobs = _blobs(levels, index)  # (k, 4): y, x, sigma, contrast
            words, blobs = _describe(levels[index], blobs)
            hashes.append(words)
            found.append(np.column_stack([blobs[:, :3] * step, blobs[:, 3], np.arange(len(blobs))]))
    table, words = np.concatenate(found), np.concatenate(hashes)
    best = np.argsort(-table[:, 3], kind="stable")[:MOST]
    y, x, sigma = table[best, :3].T
    stored = np.zeros(len(best), STORED)
    stored["hash"] = words[best]
    stored["x"], stored["y"] = (
        np.clip(256 * (x + 0.5) / width, 0, 255),
        np.clip(256 * (y + 0.5) / height, 0, 255),
    )
    stored["scale"] = np.clip(SCALE_STEPS * np.log2(sigma), 0, 255)
    return HEADER.pack(image.width / image.height, len(stored)) + stored.tobytes()


def is_complete(packed: bytes) -> bool:
    """Whether packed keypoints have the length that their header states."""
    return (
        len(packed) >= HEADER.size
        and len(packed) == HEADER.size + HEADER.unpack_from(packed)[1] * STORED.itemsize
    )


def unpack(packed: bytes) -> Keypoints:
    """The keypoints that `find_keypoints` packed."""
    aspect, _ = HEADER.unpack_from(packed)
    stored = np.frombuffer(packed, STORED, offset=HEADER.size)
    sides = np.array([aspect**0.5, aspect**-0.5], np.float32)
    places = np.column_stack([stored["x"], stored["y"], stored["scale"]]).astype(np.float32) + np.float32(0.5)
    places *= np.array([*(sides / 256), 1 / SCALE_STEPS], np.float32)
    return Keypoints(sides, stored["hash"].astype(np.uint64), places)


def _reduce(image: Image.Image) -> np.ndarray:
    """The brightness of an image with about SIDE^2 pixels: float32 (h, w)."""
    factor = SIDE / (image.width * image.height) ** 0.5
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    reduced = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L")
    return np.asarray(reduced, dtype=np.float32)


def _octaves(grey: np.ndarray) -> Iterator[tuple[int, list[np.ndarray]]]:
    """For each octave: px of the reduced image per px, and the image at SCALES + 3 increasing blurs."""
    step, level = 1, _blur(grey, (SIGMA**2 - CAMERA_SIGMA**2) ** 0.5)
    while min(level.shape) >= SMALLEST:
        levels = [level]
        for index in range(1, SCALES + 3):
            before, after = (SIGMA * 2 ** (at / SCALES) for at in (index - 1, index))
            levels.append(_blur(levels[-1], (after**2 - before**2) ** 0.5))
        yield step, levels
        step, level = 2 * step, levels[SCALES][::2, ::2]


def _blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of (h, w); the edges are repeated."""
    radius = int(3 * sigma + 0.5)
    kernel = np.exp(-(np.arange(radius + 1) ** 2) / (2 * sigma**2)).astype(np.float32)
    kernel /= kernel[0] + 2 * kernel[1:].sum()
    for _ in range(2):  # down, then across
        padded = np.pad(image, ((radius, radius), (0, 0)), mode="edge")
        count = len(image)
        blurred = kernel[0] * padded[radius : radius + count]
        for offset in range(1, radius + 1):
            above, below = radius - offset, radius + offset
            blurred += kernel[offset] * (padded[above : above + count] + padded[below : below + count])
        image = blurred.T
    return np.ascontiguousarray(image)


def _blobs(levels: list[np.ndarray], index: int) -> np.ndarray:
    """Extrema around scale `index` that are not on an edge: (k, 4) with y, x, sigma and contrast."""
    finer, here, coarser = (levels[at + 1] - levels[at] for at in (index - 1, index, index + 1))
    middle = here[1:-1, 1:-1]
    highest, lowest = np.full_like(middle, -np.inf), np.full_like(middle, np.inf)
    height, width = middle.shape
    for number, difference in enumerate((here, finer, coarser)):
        for down in range(3):
            for right in range(3):
                if number or (down, right) != (1, 1):
                    neighbour = difference[down : down + height, right : right + width]
                    np.maximum(highest, neighbour, out=highest)
                    np.minimum(lowest, neighbour, out=lowest)
    is_extremum = ((middle > highest) | (middle < lowest)) & (np.abs(middle) > MIN_CONTRAST)
    y, x = (position + 1 for position in np.nonzero(is_extremum))
    y, x = _without_edges(here, y, x)
    below, value, above = finer[y, x], here[y, x], coarser[y, x]
    offset = (below - above) / (
        2 * (below + above - 2 * value)
    )  # vertex of the parabola; an extremum: not 0 / 0
    sigma = SIGMA * 2 ** ((index + np.clip(offset, -0.5, 0.5)) / SCALES)
    return np.column_stack([y, x, sigma, np.abs(value)])


def _without_edges(here: np.ndarray, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions whose two curvatures differ by less than EDGE_RATIO; on an edge, one is near zero."""
    value = here[y, x]
    down = here[y + 1, x] + here[y - 1, x] - 2 * value
    right = here[y, x + 1] + here[y, x - 1] - 2 * value
    mixed = (here[y + 1, x + 1] - here[y + 1, x - 1] - here[y - 1, x + 1] + here[y - 1, x - 1]) / 4
    product, total = down * right - mixed**2, down + right
    round_ones = (product > 0) & (total**2 * EDGE_RATIO < (EDGE_RATIO + 1) ** 2 * product)
    return y[round_ones], x[round_ones]


def _describe(level: np.ndarray, blobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes uint64 (k,) of the windows around blobs, and those blobs; windows far outside are left out."""
    half = blobs[:, 2] * WINDOW / 2
    room = half * (1 - 2 * OUTSIDE)
    y, x = blobs[:, 0], blobs[:, 1]
    height, width = level.shape
    inside = (y > room) & (x > room) & (y + room < height) & (x + room < width)
    blobs, half = blobs[inside], half[inside]
    offsets = ((np.arange(GRID) + 0.5) / GRID * 2 - 1) * half[:, None]  # (k, GRID)
    rows, columns = (
        np.clip(np.rint(blobs[:, [axis]] + offsets).astype(np.int64), 0, level.shape[axis] - 1)
        for axis in (0, 1)
    )
    windows = level[rows[:, :, None], columns[:, None, :]]  # (k, GRID, GRID)
    waves = _COSINES @ windows.astype(np.float64) @ _COSINES.T
    signs = np.packbits(waves[:, _DOWN, _RIGHT] > 0, axis=1)  # (k, 8): the lowest frequencies first
    return np.ascontiguousarray(signs).view(">u8").astype(np.uint64)[:, 0], blobs
