"""Clusters of images that look alike: perceptual hashes with few different signs.

Shapes: N images; U different hashes. A hash is uint64 (2,), as perceptual_hash.py makes it.
"""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from vae.prepare.perceptual_hash import MIRROR

# Measured on 60 drawn images and 11 changed copies of each (JPEG 30, reduced, other brightness and contrast,
# grey, blur, stretch, mirrored, 1 % cropped on each side): copies differ in at most 5 of the lower 64 signs
# and 13 of 128, different images in at least 17 and 43. With 3 % cropped on each side, a fifth of the copies
# is found.
MAX_LOW, MAX_ALL = 5, 20
# Hashes that differ in 5 bits agree in at least 3 of 8 bytes, so every choice of 3 bytes is a bucket key.
# With 2**27 hashes, and as many mirrored ones, a bucket has 16.
BYTES, KEY_BYTES = 8, 3
_PAIRS, _FOURS, _OCTETS, _SUM = (np.uint64(2**64 // n) for n in (3, 5, 17, 255))  # 0x55.., 33.., 0f.., 01..
# In a large bucket (skies, blank pages), a hash is compared only with the next ones in sorted order.
MAX_NEIGHBOURS = 64


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
    parents = np.arange(len(unique))
    both = np.concatenate([unique, unique ^ MIRROR])
    position = np.concatenate([parents, parents])
    for chosen in combinations(range(BYTES), KEY_BYTES):
        keys = bucket_keys(both, chosen)
        order = np.argsort(keys, kind="stable")  # `unique` is sorted: similar hashes become adjacent
        keys = keys[order]
        for step in range(1, MAX_NEIGHBOURS + 1):
            same = np.flatnonzero(keys[step:] == keys[:-step])
            if len(same) == 0:
                break
            left, right = order[same], order[same + step]
            near = are_near(both[left], both[right])
            _join(parents, position[left[near]], position[right[near]])
    return find_roots(parents)


def near_between(one: np.ndarray, other: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of near hashes, of (M, 2) and of (N, 2), in blocks; some pairs more than once."""
    both = np.concatenate([other, other ^ MIRROR])
    for chosen in combinations(range(BYTES), KEY_BYTES):
        keys = bucket_keys(both, chosen)
        order = np.argsort(keys, kind="stable")
        keys, wanted = keys[order], bucket_keys(one, chosen)
        first = np.searchsorted(keys, wanted)
        for at in range(min(MAX_NEIGHBOURS, len(keys))):
            places = np.minimum(first + at, len(keys) - 1)
            same = np.flatnonzero((first + at < len(keys)) & (keys[places] == wanted))
            if len(same) == 0:
                break
            neighbours = order[places[same]]
            near = are_near(one[same], both[neighbours])
            yield same[near], neighbours[near] % len(other)


def bucket_keys(hashes: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
    """The chosen bytes of the lower word of (M, 2) hashes as one number each: uint32 (M,)."""
    keys = np.zeros(len(hashes), dtype=np.uint32)
    for index, byte in enumerate(chosen):
        octets = (hashes[:, 0] >> np.uint64(8 * byte) & np.uint64(0xFF)).astype(np.uint32)
        keys += octets << np.uint32(8 * index)
    return keys


def are_near(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether two hashes are near, for each pair of (M, 2): bool (M,)."""
    low, high = (count_ones(words) for words in (one ^ other).T)
    return (low <= MAX_LOW) & (low + high <= MAX_ALL)


def count_ones(words: np.ndarray) -> np.ndarray:
    """Number of ones in each uint64 (Warren, Hacker's Delight, section 5-1): uint64."""
    pairs = words - (words >> np.uint64(1) & _PAIRS)
    fours = (pairs & _FOURS) + (pairs >> np.uint64(2) & _FOURS)
    octets = fours + (fours >> np.uint64(4)) & _OCTETS
    return octets * _SUM >> np.uint64(56)


def _join(parents: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Union of sets, in place: the smaller root becomes the parent."""
    apart = left != right
    for one, other in zip(left[apart].tolist(), right[apart].tolist(), strict=True):
        one, other = find_root(parents, one), find_root(parents, other)
        if one != other:
            parents[max(one, other)] = min(one, other)


def find_root(parents: np.ndarray, one: int) -> int:
    """The root of an element; shortens its path."""
    while parents[one] != one:
        parents[one] = parents[parents[one]]
        one = int(parents[one])
    return one


def find_roots(parents: np.ndarray) -> np.ndarray:
    """Each element's root; halves every path until all parents are roots."""
    roots = parents
    while not np.array_equal(roots, roots[roots]):
        roots = roots[roots]
    return roots
