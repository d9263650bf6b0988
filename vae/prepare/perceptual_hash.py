"""Perceptual hashes of whole images.

A hash is uint64 (2,): the signs of the 128 lowest frequencies of the image's brightness. The first word
contains the lower 64 of them.
"""

import numpy as np
from PIL import Image

SIDE = 32  # px: the image's brightness is reduced to a square with this side


def lowest_frequencies(side: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The DCT-II of `side` px as a matrix (frequency, px), and the lowest frequencies in two dimensions.

    These are `count` positions down and right, without the mean.
    """
    steps = np.arange(side)
    cosines = np.cos(np.pi * (2 * steps + 1) * steps[:, None] / (2 * side))
    pairs = [(down, right) for down in steps for right in steps if down + right > 0]
    pairs.sort(key=lambda pair: (pair[0] + pair[1], max(pair), pair))
    down, right = np.array(pairs[:count]).T
    return cosines, down, right


_COSINES, _DOWN, _RIGHT = lowest_frequencies(SIDE, 128)
# The mirrored image has the opposite sign at the odd frequencies along x.
MIRROR = np.packbits(_RIGHT % 2 == 1).view(">u8").astype(np.uint64)


def hash_pixels(pixels: np.ndarray | Image.Image) -> np.ndarray:
    """Perceptual hash uint64 (2,) of an image: (H, W, 3) uint8 or a Pillow image."""
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L")
    waves = _COSINES @ np.asarray(image, dtype=np.float64) @ _COSINES.T  # (32, 32)
    return np.packbits(waves[_DOWN, _RIGHT] > 1e-6).view(">u8").astype(np.uint64)
