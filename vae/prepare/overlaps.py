"""Images that show overlapping parts of a photograph: pairs with keypoints in the same arrangement.

Keypoints with near hashes are matches. Two images overlap if four matches agree on one zoom and shift that
maps one image onto the other. Matches are found by sorting, so time and memory grow linearly with the images.

Shapes: N images; M keypoints of all images; m matches of a pair.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from vae.prepare.keypoints import MIRROR, Keypoints, unpack
from vae.prepare.near_duplicates import count_ones, find_root, find_roots

# Measured on crops of 24 photographs (docs/splits.md): two thirds of the matches differ in at most 7 signs.
MAX_SIGNS = 12  # different signs of a match
BYTES, KEY_BYTES = 5, 3  # hashes that agree in 3 of their 5 lowest bytes are compared
MAX_NEIGHBOURS = 4  # a hash is compared with the next ones in sorted order, also in a large bucket
MIN_MATCHES = 4  # that agree; different photographs had at most 3
SHIFT_TOLERANCE, ZOOM_TOLERANCE = 0.06, 0.5  # in units of the square root of the area, and in octaves
MIN_OVERLAP = 0.3  # of the smaller image
MAX_MATCHES = 64  # of a pair that are compared with each other
MAX_CHECKS = 16  # pairs of an image that are checked per table of keys


def join_overlapping(clusters: np.ndarray, hashes: np.ndarray, keypoints: Sequence[bytes]) -> np.ndarray:
    """Clusters (N,) joined by overlapping images, as the position of each cluster's first member.

    `clusters` has the same form: that of find_clusters for `hashes` (N, 2). `keypoints` are those of each
    image, packed. Of images with equal hashes, only the first is searched.
    """
    parents = clusters.copy()
    _, firsts = np.unique(hashes, axis=0, return_index=True)
    search = _Search(keypoints, np.sort(firsts))
    pending = np.zeros(0, np.uint64)
    for matches in search.tables():
        pending = np.unique(np.concatenate([pending, matches]))
        pending = pending[search.are_apart(pending, find_roots(parents))]
        for one, other, pair_matches in search.pairs(pending):
            first, second = find_root(parents, one), find_root(parents, other)
            if first != second and search.overlap(one, other, pair_matches):
                parents[max(first, second)] = min(first, second)
    return find_roots(parents)


class _Search:
    """The keypoints of all images, and those of the mirrored images.

    A match is one uint64: the positions of two keypoints, and a bit that is set if one of them is mirrored.
    """

    def __init__(self, packed: Sequence[bytes], images: np.ndarray):
        self.packed = packed
        hashes_of = [unpack(packed[image]).hashes for image in images]
        counts = [len(hashes) for hashes in hashes_of]
        self.hashes = np.concatenate([np.zeros(0, np.uint64), *hashes_of])  # (M,)
        self.image_of = np.repeat(images.astype(np.uint32), counts)  # (M,)
        self.first = dict(zip(images.tolist(), np.cumsum([0, *counts]).tolist(), strict=False))  # by image

    def tables(self) -> Iterator[np.ndarray]:
        """For each choice of key bytes: the matches among neighbours with equal keys, uint64 (m,)."""
        both = np.concatenate([self.hashes, self.hashes ^ MIRROR]).astype(">u8")  # (2 M,)
        octets = both.view(np.uint8).reshape(-1, 8)  # the lowest frequencies first
        for chosen in combinations(range(BYTES), KEY_BYTES):
            rest = [byte for byte in range(8) if byte not in chosen]
            words = np.ascontiguousarray(octets[:, [*chosen, *rest]]).view(">u8")[:, 0].astype(np.uint64)
            order = np.argsort(words).astype(np.uint32)
            words = words[order]
            matches = [np.zeros(0, np.uint64)]
            for step in range(1, MAX_NEIGHBOURS + 1):
                same = np.flatnonzero((words[step:] ^ words[:-step]) >> np.uint64(64 - 8 * KEY_BYTES) == 0)
                matches.append(self._matches(order[same], order[same + step]))
            yield np.concatenate(matches)

    def _matches(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The matches among pairs of positions in the hashes and mirrored hashes."""
        count = len(self.hashes)
        is_plain = np.minimum(left, right) < count  # two mirrored keypoints match if the plain ones do
        left, right = left[is_plain], right[is_plain]
        mirrored = np.maximum(left, right) >= count
        left, right = left % count, right % count
        left, right = np.minimum(left, right), np.maximum(left, right)
        different = self.hashes[left] ^ self.hashes[right] ^ np.where(mirrored, MIRROR, np.uint64(0))
        good = (self.image_of[left] != self.image_of[right]) & (count_ones(different) <= MAX_SIGNS)
        left, right, mirrored = left[good].astype(np.uint64), right[good].astype(np.uint64), mirrored[good]
        return left << np.uint64(32) | right << np.uint64(1) | mirrored

    def _images(self, matches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two images of each match, the earlier one first."""
        left, right, _ = _split_matches(matches)
        return self.image_of[left], self.image_of[right]

    def are_apart(self, matches: np.ndarray, roots: np.ndarray) -> np.ndarray:
        """Whether the two images of each match are in different clusters: bool (m,)."""
        one, other = self._images(matches)
        return roots[one] != roots[other]

    def pairs(self, matches: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Pairs of images with enough matches, and their matches; pairs with most matches first."""
        one, other = self._images(matches)
        keys = one.astype(np.uint64) << np.uint64(32) | other
        order = np.argsort(keys, kind="stable")
        _, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
        checks: Counter[int] = Counter()
        for at in np.argsort(-counts, kind="stable"):
            if counts[at] < MIN_MATCHES:
                return
            chosen = order[first[at] : first[at] + min(counts[at], MAX_MATCHES)]
            pair = int(one[chosen[0]]), int(other[chosen[0]])
            if max(checks[image] for image in pair) < MAX_CHECKS:
                checks.update(pair)
                yield *pair, matches[chosen]

    def overlap(self, one: int, other: int, matches: np.ndarray) -> bool:
        """Whether two images overlap, by their matches."""
        left, right, mirrored = _split_matches(matches)
        left, right = left - self.first[one], right - self.first[other]
        images = unpack(self.packed[one]), unpack(self.packed[other])
        return overlap_share(*images, left, right, mirrored) >= MIN_OVERLAP


def _split_matches(matches: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two positions of each match, int64, and whether one is mirrored: (m,) each."""
    left, right = matches >> np.uint64(32), (matches & np.uint64(0xFFFFFFFF)) >> np.uint64(1)
    return left.astype(np.int64), right.astype(np.int64), matches & np.uint64(1) == 1


def overlap_share(
    one: Keypoints, other: Keypoints, left: np.ndarray, right: np.ndarray, mirrored: np.ndarray
) -> float:
    """The share of the smaller image that the other one shows too; 0 if too few matches agree.

    `left` and `right` (m,) are the matches as positions of keypoints in `one` and `other`; those that are
    `mirrored` compare `one` with the mirrored image of `other`.
    """
    start, end = one.places[left], other.places[right]  # (m, 3)
    end[mirrored, 0] = other.sides[0] - end[mirrored, 0]
    zoom = end[:, 2] - start[:, 2]
    factor = np.exp2(zoom)[:, None]
    shift = end[:, :2] - factor * start[:, :2]  # (m, 2): of the map from one image to the other
    mapped = factor[:, None] * start[None, :, :2] + shift[:, None]  # (m, m, 2): by each match, each keypoint
    agree = np.abs(mapped - end[:, :2]).max(axis=2) < SHIFT_TOLERANCE
    agree &= (np.abs(zoom[:, None] - zoom) < ZOOM_TOLERANCE) & (mirrored[:, None] == mirrored)
    best = agree[agree.sum(axis=1).argmax()]
    if min(len(np.unique(left[best])), len(np.unique(right[best]))) < MIN_MATCHES:
        return 0.0
    return _shared_area(one.sides, other.sides, start[best, :2], end[best, :2])


def _shared_area(one: np.ndarray, other: np.ndarray, start: np.ndarray, end: np.ndarray) -> float:
    """The share of the smaller image in the other, by the least-squares zoom and shift of (m, 2) points."""
    start_mean, end_mean = start.mean(axis=0), end.mean(axis=0)
    spread = ((start - start_mean) ** 2).sum()
    if spread < SHIFT_TOLERANCE**2:  # all at one place
        return 0.0
    factor = ((start - start_mean) * (end - end_mean)).sum() / spread
    if factor <= 0:
        return 0.0
    low = end_mean - factor * start_mean  # the corner of the first image, in the second
    width, height = np.clip(np.minimum(other, low + factor * one) - np.maximum(0, low), 0, None)
    return float(width * height / min(1.0, factor**2))
