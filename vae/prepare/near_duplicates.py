"""Images that look alike: perceptual hashes of whole images, and clusters of those with few different signs.

A hash is uint64 (8,): the signs of the 512 lowest frequencies of the image's brightness, the lowest 64 in the
first word. Shapes: N images; U different hashes.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from PIL import Image

SIDE = 64  # px: the image's brightness is reduced to a square with this side
# Measured on 60 drawn images and 11 changed copies of each (JPEG 30, reduced, other brightness and contrast,
# grey, blur, stretch, mirrored, 1 % cropped on each side): copies differ in at most 5 of the lower 64 signs
# and 13 of 128, different images in at least 17 and 43. With 3 % cropped on each side, a fifth of the copies
# is found.
MAX_LOW, MAX_ALL = 5, 20
# Pages of text have the same low frequencies. Of the next 384 signs, changed copies of pages, drawings and
# photographs (the same changes) differ in at most 54, pages with other words in at least 118.
COARSE_WORDS, MAX_FINE = 2, 84
# Hashes that differ in 5 bits agree in at least 3 of 8 bytes, so every choice of 3 bytes is a bucket key.
# With 2**27 hashes, and as many mirrored ones, a bucket has 16.
BYTES, KEY_BYTES = 8, 3
# In a large bucket (skies, blank pages), a hash is compared only with the next ones in sorted order.
MAX_NEIGHBOURS = 64
GROUP_PREFIX = "near-"  # names of groups begin with it


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


_COSINES, _DOWN, _RIGHT = lowest_frequencies(SIDE, 512)
# The mirrored image has the opposite sign at the odd frequencies along x.
MIRROR = np.packbits(_RIGHT % 2 == 1).view(">u8").astype(np.uint64)


def hash_pixels(pixels: np.ndarray | Image.Image) -> np.ndarray:
    """Perceptual hash uint64 (8,) of an image: (H, W, 3) uint8, (H, W, 4) with alpha, or a Pillow image.

    An image with alpha is compared over white, or over black if white hides it.
    """
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0)
    levels = np.asarray(image.convert("L"), dtype=np.float64)  # (64, 64)
    if image.mode == "RGBA":
        alpha = np.asarray(image.getchannel("A"), dtype=np.float64) / 255
        over_black = levels * alpha
        over_white = over_black + 255 * (1 - alpha)
        levels = over_black if over_black.std() > 2 * over_white.std() else over_white
    waves = _COSINES @ levels @ _COSINES.T  # (64, 64)
    return np.packbits(waves[_DOWN, _RIGHT] > 1e-6).view(">u8").astype(np.uint64)


def words_of(phashes: Sequence[str] | np.ndarray) -> np.ndarray:
    """Hashes as rows have them, in 128 hexadecimal digits or the first 32 of them, as uint64 (N, 8)."""
    digits = "".join(f"{phash:0<128}" for phash in phashes)
    return np.frombuffer(bytes.fromhex(digits), ">u8").astype(np.uint64).reshape(-1, 8)


def group_names(contents: Sequence[str] | np.ndarray, hashes: np.ndarray) -> dict[int, str]:
    """The name of the group of each image that looks like another one, by its position.

    `contents`: the SHA-256 of each image, sorted; a group is named by its first one.
    """
    clusters = find_clusters(hashes)
    in_group = np.bincount(clusters, minlength=len(clusters))[clusters] > 1
    return {at: f"{GROUP_PREFIX}{contents[clusters[at]][:16]}" for at in np.flatnonzero(in_group).tolist()}


def find_clusters(hashes: np.ndarray) -> np.ndarray:
    """The cluster of each of (N, 8) hashes, as the position of its first member: int64 (N,).

    Two hashes form a pair if one of them, or its mirrored hash, differs from the other in at most MAX_LOW of
    the lowest 64 signs, MAX_ALL of 128 and MAX_FINE of the others. Clusters are the connected components of
    these pairs. All pairs are found, except in buckets with more than 64 similar hashes. Memory is needed for
    about 300 bytes per image.
    """
    if not len(hashes):
        return np.zeros(0, np.int64)
    unique, numbers = np.unique(hashes, axis=0, return_inverse=True)
    roots = _cluster_sorted(unique)[numbers.ravel()]  # (N,); numpy 2.0 returns (N, 1)
    _, first, clusters = np.unique(roots, return_index=True, return_inverse=True)
    return first[clusters]


def _cluster_sorted(unique: np.ndarray) -> np.ndarray:
    """The cluster of each of (U, 8) different hashes in sorted order, as the position of its first: (U,)."""
    roots = np.arange(len(unique))
    both = np.concatenate([unique, unique ^ MIRROR])
    position = np.concatenate([roots, roots])
    for chosen in combinations(range(BYTES), KEY_BYTES):
        keys = bucket_keys(both, chosen)
        order = np.argsort(keys, kind="stable")  # `unique` is sorted: similar hashes become adjacent
        keys = keys[order]
        for step in range(1, MAX_NEIGHBOURS + 1):
            same = np.flatnonzero(keys[step:] == keys[:-step])
            if len(same) == 0:
                break
            left = order[same]
            right = order[same + step]
            near = are_near(both[left], both[right])
            _join(roots, position[left[near]], position[right[near]])
    return roots


def bucket_keys(hashes: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
    """The chosen bytes of the first word of (M, 8) hashes as one number each: uint32 (M,)."""
    octets = hashes[:, :1].copy().view(np.uint8)[:, chosen]  # (M, 3)
    return octets @ np.array([1, 2**8, 2**16], np.uint32)


def are_near(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Whether two hashes are near, for each pair of (M, 8): bool (M,)."""
    counts = np.bitwise_count(left ^ right)  # (M, 8)
    is_coarse = (counts[:, 0] <= MAX_LOW) & (counts[:, :COARSE_WORDS].sum(axis=1) <= MAX_ALL)
    return is_coarse & (counts[:, COARSE_WORDS:].sum(axis=1) <= MAX_FINE)


def _join(roots: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Union of sets, in place: `roots`, (U,), has the first member of the set of each element."""
    while True:
        ends = np.sort(np.stack([roots[left], roots[right]]), axis=0)
        apart = ends[0] < ends[1]
        if not apart.any():
            return
        np.minimum.at(roots, ends[1][apart], ends[0][apart])
        while not np.array_equal(roots, roots[roots]):
            roots[:] = roots[roots]
