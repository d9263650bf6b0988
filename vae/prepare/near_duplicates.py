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
MOST_LOW, MOST_ALL = 5, 20
# Hashes that differ in 5 bits agree in at least 3 of 8 bytes, so every choice of 3 bytes is a bucket key.
BYTES, KEY_BYTES = 8, 3
# In a large bucket (skies, blank pages), a hash is compared only with the next ones in sorted order.
MOST_NEIGHBOURS = 64


def find_clusters(hashes: np.ndarray, *, most_low: int = MOST_LOW, most_all: int = MOST_ALL) -> np.ndarray:
    """The cluster of each of (N, 2) hashes, as the position of its first member: int64 (N,).

    Two hashes form a pair if one of them, or its mirrored hash, differs from the other in at most `most_low`
    of the lower 64 signs and `most_all` of all 128. Clusters are the connected components of these pairs.
    All pairs are found, except in buckets with more than 64 similar hashes.
    """
    if len(hashes) == 0:
        return np.zeros(0, dtype=np.int64)
    unique, first, inverse = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    parents = np.arange(len(unique))
    for left, right in _near_pairs(unique, most_low, most_all):
        _join(parents, left, right)
    roots = find_roots(parents)  # (U,): the cluster of each different hash
    earliest = np.full(len(unique), len(hashes))
    np.minimum.at(earliest, roots, first)
    return earliest[roots[inverse.reshape(-1)]]


def _near_pairs(unique: np.ndarray, most_low: int, most_all: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of near hashes among (U, 2) different ones, in blocks."""
    count = len(unique)
    both = np.concatenate([unique, unique ^ MIRROR])  # (2U, 2)
    low_bytes = np.ascontiguousarray(both[:, 0]).view(np.uint8).reshape(-1, BYTES).astype(np.uint32)
    for chosen in combinations(range(BYTES), KEY_BYTES):
        keys = np.zeros(2 * count, dtype=np.uint32)
        for index, byte in enumerate(chosen):
            keys += low_bytes[:, byte] << np.uint32(8 * index)
        order = np.argsort(keys, kind="stable")  # `unique` is sorted: similar hashes of a bucket are adjacent
        keys = keys[order]
        for step in range(1, MOST_NEIGHBOURS + 1):
            same = np.flatnonzero(keys[step:] == keys[:-step])
            if len(same) == 0:
                break
            left, right = order[same], order[same + step]
            low, high = (count_ones(words) for words in (both[left] ^ both[right]).T)
            near = (low <= most_low) & (low + high <= most_all)
            yield left[near] % count, right[near] % count


def count_ones(words: np.ndarray) -> np.ndarray:
    """Number of ones in each uint64."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.int64)


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
