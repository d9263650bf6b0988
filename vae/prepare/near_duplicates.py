"""Clusters of images that look alike: perceptual hashes with few different signs.

Shapes: N images; U different hashes. A hash is uint64 (2,), as perceptual_hash.py makes it.
"""

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from vae.prepare.disk_blocks import CHUNK, differ_from_last, in_blocks, map_file, scratch_folder
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
_PAIRS, _FOURS, _OCTETS, _SUM = (np.uint64(2**64 // n) for n in (3, 5, 17, 255))  # 0x55.., 33.., 0f.., 01..
# In a large bucket (skies, blank pages), a hash is compared only with the next ones in sorted order.
MAX_NEIGHBOURS = 64


def find_clusters(hashes: np.ndarray, folder: Path) -> np.ndarray:
    """The cluster of each of (N, 2) hashes, as the position of its first member: int64 (N,).

    Two hashes form a pair if one of them, or its mirrored hash, differs from the other in at most MAX_LOW of
    the lower 64 signs and MAX_ALL of all 128. Clusters are the connected components of these pairs.
    All pairs are found, except in buckets with more than 64 similar hashes. Among more than MAX_SHORT_KEYS
    hashes, 24 % of the pairs that differ in MAX_LOW signs are not found.

    Hashes are sorted in `folder`; memory is needed for 48 bytes per image.
    """
    with scratch_folder(folder / "clusters") as scratch:
        numbers = sort_different(hashes, scratch / "sorted")
        roots = cluster_sorted(map_file(scratch / "sorted", ">u8", 2), scratch)[numbers]  # (N,)
    earliest = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    earliest[roots[::-1]] = np.arange(len(hashes))[::-1]  # the last one that is assigned is the first image
    return earliest[roots]


def sort_different(hashes: np.ndarray, path: Path) -> np.ndarray:
    """Write the different ones of (N, 2) hashes, sorted, as big-endian words; returns the position of each
    there: int64 (N,)."""
    numbers, count = np.zeros(len(hashes), np.int64), 0
    with path.open("wb") as file:
        octets = partial(bucket_keys, chosen=(BYTES - 1,))  # the highest ones
        for block in in_blocks(partial(_numbered, hashes), octets, path.parent):
            block = block[np.lexsort((block[:, 1], block[:, 0]))]
            is_new = differ_from_last(block[:, :2])
            numbers[block[:, 2].astype(np.int64)] = count - 1 + np.cumsum(is_new)
            count += int(is_new.sum())
            file.write(np.ascontiguousarray(block[is_new, :2], ">u8").data)
    return numbers


def cluster_sorted(unique: np.ndarray, folder: Path) -> np.ndarray:
    """The cluster of each of (U, 2) different hashes in sorted order, as the position of its first: (U,).

    `unique` may be a memory map. Hashes are sorted in `folder`; memory is needed for 24 bytes per hash.
    """
    parents = np.arange(len(unique))
    for left, right in _near_pairs(unique, folder):
        _join(parents, left, right)
    return find_roots(parents)


def _near_pairs(unique: np.ndarray, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of near hashes among (U, 2) different ones, in blocks."""
    key_bytes = KEY_BYTES if len(unique) <= MAX_SHORT_KEYS else LONG_KEY_BYTES
    for byte in range(BYTES - key_bytes + 1):  # the first of a key: hashes that agree in it are in a block
        octets = partial(bucket_keys, chosen=(byte,))
        for block in in_blocks(partial(_numbered, unique, with_mirrored=True), octets, folder):
            hashes, position = block[:, :2], block[:, 2].astype(np.int64)
            for others in combinations(range(byte + 1, BYTES), key_bytes - 1):
                keys = bucket_keys(hashes, (byte, *others))
                order = np.argsort(keys, kind="stable")  # `unique` is sorted: similar hashes become adjacent
                keys = keys[order]
                for step in range(1, MAX_NEIGHBOURS + 1):
                    same = np.flatnonzero(keys[step:] == keys[:-step])
                    if len(same) == 0:
                        break
                    left, right = order[same], order[same + step]
                    near = are_near(hashes[left], hashes[right])
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


def _numbered(hashes: np.ndarray, with_mirrored: bool = False) -> Iterator[np.ndarray]:
    """The (M, 2) hashes, and then the mirrored hashes, with their positions: (m, 3), some at a time."""
    for mirror in (np.zeros_like(MIRROR), MIRROR)[: 1 + with_mirrored]:
        for first in range(0, len(hashes), CHUNK):
            words = hashes[first : first + CHUNK].astype(np.uint64) ^ mirror
            yield np.column_stack([words, np.arange(first, first + len(words), dtype=np.uint64)])


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
