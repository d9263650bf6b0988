"""Keypoints of an image: blobs that another crop of the photograph has too, with a hash of each.

OpenCV's SIFT finds the blobs, extrema of differences of Gaussians over position and scale (Lowe 2004,
"Distinctive image features from scale-invariant keypoints", sections 3 and 4). SIFT's descriptor would take
128 bytes. Our hash takes 8: the signs of the 64 lowest frequencies of the brightness around the blob, which
do not change with brightness, contrast and scale.

Shapes: h, w are the sides of the reduced image; K keypoints.
"""

import struct
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import Image

from vae.prepare.perceptual_hash import lowest_frequencies

SIDE = 192  # px: images are reduced to SIDE^2 pixels; at 256 the same keypoints take twice the time
MAX_KEYPOINTS = 48  # keypoints of one image, the strongest
SIGMA = 1.6  # px: the smallest blob; Lowe 2004, section 3.3
MIN_CONTRAST = 0.02  # of OpenCV's SIFT; half its default, for images as small as these
WINDOW = 12.0  # sides of the hashed window, in sigmas of the blob; 8 and 16 found fewer crops
OUTSIDE = 0.125  # share of the window's side that may be outside the image
GRID = 16  # samples per side of the window
OVERSAMPLING = 4  # samples per side that are averaged into one of them
MIN_SIDE = 24  # px: a smaller side has no room for a window
STORED = np.dtype([("hash", "<u8"), ("x", "u1"), ("y", "u1"), ("scale", "u1")])  # 11 bytes
SCALE_STEPS = 32  # of the stored scale, per octave
HEADER = struct.Struct("<fBB")  # width / height, K, and VERSION
VERSION = 2  # of the detector: stored keypoints of another one are found again


class Keypoints(NamedTuple):
    """The keypoints of an image; lengths are in units of the square root of its area."""

    sides: np.ndarray  # float32 (2,): width, height
    hashes: np.ndarray  # uint64 (K,)
    places: np.ndarray  # float32 (K, 3): x, y, log2 of the blob's size in px of the reduced image


_, _DOWN, _RIGHT = lowest_frequencies(GRID, 64)
# In the mirrored image, a keypoint has the opposite sign at the odd frequencies along x.
MIRROR = np.packbits(_RIGHT % 2 == 1).view(">u8").astype(np.uint64)[0]


def find_keypoints(image: Image.Image) -> bytes:
    """The strongest keypoints of an image, packed in 6 + 11 K bytes; `unpack` reads them."""
    grey = _reduce(image)
    height, width = grey.shape
    rows: list[tuple[Any, ...]] = []
    for x, y, sigma in _blobs(grey):
        if len(rows) < MAX_KEYPOINTS and (word := _hash(grey, x, y, sigma)) is not None:
            at = (256 * (x + 0.5) / width, 256 * (y + 0.5) / height, SCALE_STEPS * np.log2(sigma))
            rows.append((word, *np.clip(at, 0, 255)))
    stored = np.array(rows, STORED)
    return HEADER.pack(image.width / image.height, len(stored), VERSION) + stored.tobytes()


def is_complete(packed: bytes) -> bool:
    """Whether packed keypoints are of this version and have the length that their header states."""
    if len(packed) < HEADER.size:
        return False
    _, count, version = HEADER.unpack_from(packed)
    return version == VERSION and len(packed) == HEADER.size + count * STORED.itemsize


def unpack(packed: bytes) -> Keypoints:
    """The keypoints that `find_keypoints` packed."""
    aspect, _, _ = HEADER.unpack_from(packed)
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


def _blobs(grey: np.ndarray) -> list[tuple[float, float, float]]:
    """x, y and sigma in px of every blob, the strongest first; SIFT may report one several times."""
    if min(grey.shape) < MIN_SIDE:
        return []
    cv2.setNumThreads(0)  # images are prepared by several processes
    detector = cv2.SIFT.create(contrastThreshold=MIN_CONTRAST, sigma=SIGMA)
    blobs = detector.detect(grey.astype(np.uint8))
    contrasts = {(p.pt[0], p.pt[1], p.size / 2): p.response for p in blobs if p.size / 2 >= SIGMA}
    return sorted(contrasts, key=lambda blob: -contrasts[blob])


def _hash(grey: np.ndarray, x: float, y: float, sigma: float) -> np.uint64 | None:
    """The hash of the window around a blob; None if the window is too far outside of the image."""
    half, count = sigma * WINDOW / 2, GRID * OVERSAMPLING
    room, (height, width) = half * (1 - 2 * OUTSIDE), grey.shape
    if not (room < x < width - room and room < y < height - room):
        return None
    step = 2 * half / count
    to_image = np.array([[step, 0, x - half + step / 2], [0, step, y - half + step / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    window = cv2.warpAffine(grey, to_image, (count, count), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    waves = cv2.dct(cv2.resize(window, (GRID, GRID), interpolation=cv2.INTER_AREA))
    return np.packbits(waves[_DOWN, _RIGHT] > 0).view(">u8").astype(np.uint64)[0]  # lowest frequencies first
