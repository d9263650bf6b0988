"""Clusters of images that look alike: perceptual hashes with few different signs.

Shapes: N images; U different hashes. A hash is uint64 (2,), as perceptual_hash.py makes it.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from vae.prepare.perceptual_hash import MIRROR

# Measured on 60 drawn images and 11 changed copies of each (JPEG 30, reduced, other brightness and contrast,
# grey, blur, stretch, mirrored, 1 % cropped on each side): copies differ in at most 5 of the lower 64 signs
# and 13 of 128, different images in at least 17 and 43. With 3 % cropped on each side, a fifth of the copies
# is found.
MAX_LOW, MAX_ALL = 5, 20
# Hashes that differ in 5 bits agree in at least 3 of 8 bytes, so every choice of 3 bytes is a bucket key.
# With 2**27 hashes, and as many mirrored ones, a bucket has 16. For more hashes, a key has 4 bytes.
# This finds all pairs that differ in at most 4 bits, and 76 % of those that differ in 5: in at most 4 bytes.
BYTES, KEY_BYTES, LONG_KEY_BYTES = 8, 3, 4
MAX_SHORT_KEYS = 2**27
# In a large bucket (skies, blank pages), a hash is compared only with the next ones in sorted order.
MAX_NEIGHBOURS = 64
MAX_AT_ONCE = 2**22  # hashes that are sorted at once, about 200 MB; more of them are sorted in parts
CHUNK = 2**20  # hashes that are read at once


def find_clusters(hashes: np.ndarray) -> np.ndarray:
    """The cluster of each of (N, 2) hashes, as the position of its first member: int64 (N,).

    Two hashes form a pair if one of them, or its mirrored hash, differs from the other in at most MAX_LOW of
    the lower 64 signs and MAX_ALL of all 128. Clusters are the connected components of these pairs.
    All pairs are found, except in buckets with more than 64 similar hashes. Among more than MAX_SHORT_KEYS
    hashes, 24 % of the pairs that differ in MAX_LOW signs are not found.
    """
    if len(hashes) == 0:
        return np.zeros(0, dtype=np.int64)
    unique, first, inverse = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    roots = cluster_sorted(unique)  # (U,): the cluster of each different hash
    earliest = np.full(len(unique), len(hashes))
    np.minimum.at(earliest, roots, first)
    return earliest[roots[inverse.reshape(-1)]]


def cluster_sorted(unique: np.ndarray, max_at_once: int = MAX_AT_ONCE) -> np.ndarray:
    """The cluster of each of (U, 2) different hashes in sorted order, as the position of its first: (U,).

    `unique` may be a memory map: memory is needed for `max_at_once` hashes, and 16 bytes for each.
    """
    parents = np.arange(len(unique))
    if not len(unique):
        return parents
    for left, right in _near_pairs(unique, max_at_once):
        _join(parents, left, right)
    return find_roots(parents)


def _near_pairs(unique: np.ndarray, max_at_once: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of near hashes among (U, 2) different ones, in blocks."""
    parts = max(1, min(256, -(-2 * len(unique) // max_at_once)))
    limits = [256 * part // parts for part in range(parts + 1)]
    key_bytes = KEY_BYTES if len(unique) <= MAX_SHORT_KEYS else LONG_KEY_BYTES
    for chosen in combinations(range(BYTES), key_bytes):
        for least, limit in pairwise(limits):  # hashes that agree in the first byte are in the same part
            both, position = _with_byte(unique, chosen[0], least, limit)
            keys = bucket_keys(both, chosen)
            order = np.argsort(keys, kind="stable")  # `unique` is sorted: similar hashes become adjacent
            keys = keys[order]
            for step in range(1, MAX_NEIGHBOURS + 1):
                same = np.flatnonzero(keys[step:] == keys[:-step])
                if len(same) == 0:
                    break
                left, right = order[same], order[same + step]
                near = are_near(both[left], both[right])
                yield position[left[near]], position[right[near]]


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


def _with_byte(unique: np.ndarray, byte: int, least: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes and mirrored hashes with a byte of [least, limit): (M, 2), and their positions (M,)."""
    hashes, positions = [], []
    for mirror in (np.zeros_like(MIRROR), MIRROR):
        for first in range(0, len(unique), CHUNK):
            rows = unique[first : first + CHUNK].astype(np.uint64) ^ mirror
            octets = rows[:, 0] >> np.uint64(8 * byte) & np.uint64(0xFF)
            chosen = np.flatnonzero((octets >= least) & (octets < limit))
            hashes.append(rows[chosen])
            positions.append(first + chosen)
    return np.concatenate(hashes), np.concatenate(positions)


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
