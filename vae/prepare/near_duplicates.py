"""Images that look alike: perceptual hashes of whole images, and clusters of those with few different signs.

A hash is uint64 (2,): the signs of the 128 lowest frequencies of the image's brightness. The first word
contains the lower 64 of them. Shapes: N images; U different hashes.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from PIL import Image

SIDE = 32  # px: the image's brightness is reduced to a square with this side
# Measured on 60 drawn images and 11 changed copies of each (JPEG 30, reduced, other brightness and contrast,
# grey, blur, stretch, mirrored, 1 % cropped on each side): copies differ in at most 5 of the lower 64 signs
# and 13 of 128, different images in at least 17 and 43. With 3 % cropped on each side, a fifth of the copies
# is found.
MAX_LOW, MAX_ALL = 5, 20
# Hashes that differ in 5 bits agree in at least 3 of 8 bytes, so every choice of 3 bytes is a bucket key.
# With 2**27 hashes, and as many mirrored ones, a bucket has 16.
BYTES, KEY_BYTES = 8, 3
# In a large bucket (skies, blank pages), a hash is compared only with the next ones in sorted order.
MAX_NEIGHBOURS = 64
GROUP_PREFIX = "near-"  # of the names of groups


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


def words_of(phashes: Sequence[str] | np.ndarray) -> np.ndarray:
    """Hashes as rows have them, 32 hexadecimal digits each, as uint64 (N, 2)."""
    return np.frombuffer(bytes.fromhex("".join(phashes)), ">u8").astype(np.uint64).reshape(-1, 2)


def group_names(contents: Sequence[str] | np.ndarray, hashes: np.ndarray) -> dict[int, str]:
    """The name of the group of each image that looks like another one, by its position.

    `contents`: the SHA-256 of each image, sorted; a group is named by its first one.
    """
    clusters = find_clusters(hashes)
    in_group = np.bincount(clusters, minlength=len(clusters))[clusters] > 1
    return {at: f"{GROUP_PREFIX}{contents[clusters[at]][:16]}" for at in np.flatnonzero(in_group).tolist()}


def find_clusters(hashes: np.ndarray) -> np.ndarray:
    """The cluster of each of (N, 2) hashes, as the position of its first member: int64 (N,).

    Two hashes form a pair if one of them, or its mirrored hash, differs from the other in at most MAX_LOW of
    the lower 64 signs and MAX_ALL of all 128. Clusters are the connected components of these pairs.
    All pairs are found, except in buckets with more than 64 similar hashes. Memory is needed for about 150
    bytes per image.
    """
    if not len(hashes):
        return np.zeros(0, np.int64)
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    sorted_hashes = hashes[order]
    is_new = np.concatenate([[True], (sorted_hashes[1:] != sorted_hashes[:-1]).any(axis=1)])
    numbers = np.empty(len(hashes), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    roots = _cluster_sorted(sorted_hashes[is_new])[numbers]  # (N,)
    earliest = np.zeros(int(numbers.max()) + 1, np.int64)
    earliest[roots[::-1]] = np.arange(len(hashes))[::-1]  # the last one that is assigned is the first image
    return earliest[roots]


def _cluster_sorted(unique: np.ndarray) -> np.ndarray:
    """The cluster of each of (U, 2) different hashes in sorted order, as the position of its first: (U,)."""
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
    """The chosen bytes of the lower word of (M, 2) hashes as one number each: uint32 (M,)."""
    keys = np.zeros(len(hashes), dtype=np.uint32)
    for index, byte in enumerate(chosen):
        octets = (hashes[:, 0] >> np.uint64(8 * byte) & np.uint64(0xFF)).astype(np.uint32)
        keys += octets << np.uint32(8 * index)
    return keys


def are_near(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether two hashes are near, for each pair of (M, 2): bool (M,)."""
    low, high = np.bitwise_count(one ^ other).T
    return (low <= MAX_LOW) & (low + high <= MAX_ALL)


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
