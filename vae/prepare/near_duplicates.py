"""Images that show the same thing: a perceptual hash of each, and clusters of hashes that nearly agree.

Shapes: N images. A hash is uint64 (2,): the signs of the 128 lowest frequencies of the image's
brightness, the lower 64 of them in the first word.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from PIL import Image, ImageOps

from vae.config.options import MAX_PIXELS
from vae.data.decoding import DECODER_ERRORS, decode_image
from vae.data.formats import sniff_format

SIDE = 32  # px: the image's brightness is reduced to a square of this side
DRAFT_SIDE = 64  # px: a JPEG is decoded no larger than needed
# Measured on 60 drawn images and 11 changed copies of each (JPEG 30, reduced, other brightness and
# contrast, grey, blur, stretch, mirrored, 1 % cut off on each side): copies differ in at most 5 of the lower
# 64 signs and 13 of 128, different images in at least 17 and 43. With 3 % cut off on each side a fifth
# of the copies is found.
MOST_LOW, MOST_ALL = 5, 20
# Hashes that differ in 5 bits agree in 3 of 8 bytes, so each choice of 3 bytes is a key to meet by.
BYTES, KEY_BYTES = 8, 3
# In a bucket of many (skies, blank pages) a hash is compared with the next ones in order only.
MOST_NEIGHBOURS = 64


def _frequencies() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps = np.arange(SIDE)
    cosines = np.cos(np.pi * (2 * steps + 1) * steps[:, None] / (2 * SIDE))  # DCT-II, (frequency, px)
    pairs = [(down, right) for down in steps for right in steps if down + right > 0]
    pairs.sort(key=lambda pair: (pair[0] + pair[1], max(pair), pair))
    down, right = np.array(pairs[:128]).T
    return cosines, down, right


_COSINES, _DOWN, _RIGHT = _frequencies()
# An image's mirror image has the other sign at the odd frequencies along x.
MIRROR = np.packbits(_RIGHT % 2 == 1).view(">u8").astype(np.uint64)


def hash_pixels(pixels: np.ndarray | Image.Image) -> np.ndarray:
    """Perceptual hash uint64 (2,) of an image, (H, W, 3) uint8 or Pillow's."""
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L")
    waves = _COSINES @ np.asarray(image, dtype=np.float64) @ _COSINES.T  # (32, 32)
    return np.packbits(waves[_DOWN, _RIGHT] > 1e-6).view(">u8").astype(np.uint64)


def hash_image_file(
    path: str | os.PathLike, *, max_pixels: int = MAX_PIXELS, background: str = "white"
) -> np.ndarray:
    """Perceptual hash of an image file; JPEGs are decoded at 64 px. Raises BadImageError."""
    try:
        with open(path, "rb") as file:
            if sniff_format(file, max_pixels) == "JPEG":
                file.seek(0)
                image = Image.open(file, formats=("JPEG",))
                if image.mode in ("L", "RGB") and image.width * image.height <= max_pixels:
                    image.draft(image.mode, (DRAFT_SIDE, DRAFT_SIDE))
                    return hash_pixels(ImageOps.exif_transpose(image))
    except DECODER_ERRORS:
        pass  # the whole reader below says what is wrong
    return hash_pixels(decode_image(path, max_pixels=max_pixels, background=background))


def hash_text(one: Sequence[int]) -> str:
    """A hash as 32 hex digits."""
    return f"{int(one[0]):016x}{int(one[1]):016x}"


def hash_of_text(text: str) -> tuple[int, int]:
    """The two words of a hash from its hex digits."""
    return int(text[:16], 16), int(text[16:32], 16)


def find_clusters(hashes: np.ndarray, *, most_low: int = MOST_LOW, most_all: int = MOST_ALL) -> np.ndarray:
    """The cluster of each of (N, 2) hashes, as the position of its first member: int64 (N,).

    Two hashes are joined when one, or its mirror image, differs from the other in at most `most_low` of the
    lower 64 signs and `most_all` of all 128; clusters are what such pairs connect. All pairs are found except
    in buckets of more than 64 alike.
    """
    if len(hashes) == 0:
        return np.zeros(0, dtype=np.int64)
    unique, first, inverse = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    parents = np.arange(len(unique))
    for left, right in _near_pairs(unique, most_low, most_all):
        _join(parents, left, right)
    roots = _roots(parents)  # (U,): each unique hash's cluster
    earliest = np.full(len(unique), len(hashes))
    np.minimum.at(earliest, roots, first)
    return earliest[roots[inverse.reshape(-1)]]


def _near_pairs(unique: np.ndarray, most_low: int, most_all: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of near hashes among (U, 2) different ones, in blocks."""
    count = len(unique)
    both = np.concatenate([unique, unique ^ MIRROR])  # (2U, 2)
    low_bytes = np.ascontiguousarray(both[:, 0]).view(np.uint8).reshape(-1, BYTES).astype(np.uint32)
    for chosen in combinations(range(BYTES), KEY_BYTES):
        keys = sum(low_bytes[:, byte] << np.uint32(8 * place) for place, byte in enumerate(chosen))
        order = np.argsort(
            keys, kind="stable"
        )  # `unique` is sorted, so alike ones of a bucket stand together
        keys = keys[order]
        for step in range(1, MOST_NEIGHBOURS + 1):
            same = np.flatnonzero(keys[step:] == keys[:-step])
            if len(same) == 0:
                break
            left, right = order[same], order[same + step]
            low, high = (_count_ones(words) for words in (both[left] ^ both[right]).T)
            near = (low <= most_low) & (low + high <= most_all)
            yield left[near] % count, right[near] % count


def _count_ones(words: np.ndarray) -> np.ndarray:
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.int64)


def _join(parents: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Union of sets, in place: the smaller root becomes the parent."""
    apart = left != right
    for one, other in zip(left[apart].tolist(), right[apart].tolist(), strict=True):
        one, other = _root(parents, one), _root(parents, other)
        if one != other:
            parents[max(one, other)] = min(one, other)


def _root(parents: np.ndarray, one: int) -> int:
    while parents[one] != one:
        parents[one] = parents[parents[one]]
        one = int(parents[one])
    return one


def _roots(parents: np.ndarray) -> np.ndarray:
    """Each element's root; halves every path until all are roots."""
    roots = parents
    while not np.array_equal(roots, roots[roots]):
        roots = roots[roots]
    return roots
