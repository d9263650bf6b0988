"""Images that show overlapping parts of a photograph: pairs with keypoints in the same arrangement.

Keypoints with near hashes are matches. Two images overlap if four matches agree on one zoom and shift that
maps one image onto the other. Matches are found by sorting on disk, so time grows linearly with the images.

Shapes: N images; M keypoints of all images; m matches.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from vae.prepare.disk_blocks import (
    CHUNK,
    append_rows,
    differ_from_last,
    in_blocks,
    map_file,
    scratch_folder,
    split_rows,
    take_rows,
)
from vae.prepare.keypoints import MIRROR, Keypoints, unpack
from vae.prepare.near_duplicates import bucket_keys, count_ones, find_root, find_roots, sort_different

# Measured on crops of 24 photographs (docs/splits.md): two thirds of the matches differ in at most 7 signs.
MAX_SIGNS = 12  # different signs of a match
BYTES, KEY_BYTES = 5, 3  # hashes that agree in 3 of their 5 lowest bytes are compared
MAX_NEIGHBOURS = 4  # a hash is compared with the next ones in sorted order, also in a large bucket
MIN_MATCHES = 4  # that agree; different photographs had at most 3
SHIFT_TOLERANCE, ZOOM_TOLERANCE = 0.06, 0.5  # in units of the square root of the area, and in octaves
MIN_OVERLAP = 0.3  # of the smaller image
MAX_MATCHES = 64  # of a pair that are compared with each other
MAX_CHECKS = 16  # pairs of an image that are checked per table of keys
# Images whose matches are in memory: about 40 matches of each are by chance among a million images, 16 bytes.
IMAGES_AT_ONCE = 2**17


def join_overlapping(
    clusters: np.ndarray, hashes: np.ndarray, keypoints: Sequence[bytes], folder: Path
) -> np.ndarray:
    """Clusters (N,) joined by overlapping images, as the position of each cluster's first member.

    `clusters` has the same form: that of find_clusters for `hashes` (N, 2). `keypoints` are those of each
    image, packed. Of images with equal hashes, only the first is searched. Keypoints and matches are sorted
    in `folder`; memory is needed for 48 bytes per image.
    """
    parents = clusters.copy()
    with scratch_folder(folder / "overlaps") as scratch:
        numbers = sort_different(hashes, scratch / "sorted")
        firsts = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
        firsts[numbers[::-1]] = np.arange(len(hashes))[::-1]  # the last one that is assigned is the first
        _Search(keypoints, np.sort(firsts), scratch).join_all(parents)
    return find_roots(parents)


class _Search:
    """The keypoints of some images, and those of the mirrored images, on disk.

    A match is two words: the position of a keypoint, and that of another one, doubled; plus 1 if one of them
    is mirrored.
    """

    def __init__(self, packed: Sequence[bytes], images: np.ndarray, scratch: Path):
        self.packed, self.images, self.scratch = packed, images, scratch
        self.starts = np.zeros(len(images) + 1, np.int64)  # of the keypoints of each image, and the end
        with (scratch / "hashes").open("wb") as file:
            for number, image in enumerate(images.tolist()):
                hashes = unpack(packed[image]).hashes
                self.starts[number + 1] = self.starts[number] + len(hashes)
                file.write(hashes.data)
        self.hashes = map_file(scratch / "hashes", "u8", 1)  # (M, 1)

    def join_all(self, parents: np.ndarray) -> None:
        """Join the clusters of images that overlap: their positions in `parents` (N,)."""
        for table in self.tables():
            self.join(parents, table)

    def tables(self) -> Iterator[str]:
        """For each choice of key bytes: its name, when its matches are on disk, by the blocks of images."""
        for first in range(BYTES - KEY_BYTES + 1):
            tables = [(first, *others) for others in combinations(range(first + 1, BYTES), KEY_BYTES - 1)]
            octets = partial(bucket_keys, chosen=(7 - first,))  # the highest byte has the lowest frequencies
            for block in in_blocks(self._both, octets, self.scratch):
                for chosen in tables:
                    for matches in self._matches(block[:, 0], block[:, 1].astype(np.int64), chosen):
                        self._store(f"matches{chosen}", matches)
            yield from (f"matches{chosen}" for chosen in tables)

    def _both(self) -> Iterator[np.ndarray]:
        """The hashes, and then the mirrored hashes, with the numbers 0 to 2 M: (m, 2), some at a time."""
        for at, mirror in ((0, np.uint64(0)), (len(self.hashes), MIRROR)):
            for first in range(0, len(self.hashes), CHUNK):
                words = self.hashes[first : first + CHUNK] ^ mirror
                numbers = np.arange(at + first, at + first + len(words), dtype=np.uint64)
                yield np.column_stack([words, numbers])

    def _matches(
        self, words: np.ndarray, numbers: np.ndarray, chosen: tuple[int, ...]
    ) -> Iterator[np.ndarray]:
        """The matches (m, 2) of hashes with neighbours that have the same key, by these bytes of them."""
        octets = words.astype(">u8").view(np.uint8).reshape(-1, 8)
        rest = [byte for byte in range(8) if byte not in chosen]
        words = np.ascontiguousarray(octets[:, [*chosen, *rest]]).view(">u8")[:, 0].astype(np.uint64)
        order = np.argsort(words, kind="stable")
        words, numbers = words[order], numbers[order]
        for step in range(1, MAX_NEIGHBOURS + 1):
            different = words[step:] ^ words[:-step]
            near = np.flatnonzero(different >> np.uint64(64 - 8 * KEY_BYTES) == 0)
            near = near[count_ones(different[near]) <= MAX_SIGNS]
            yield self._as_matches(numbers[near], numbers[near + step])

    def _as_matches(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The matches (m, 2) among pairs of numbers, those of different images."""
        count = len(self.hashes)
        is_plain = np.minimum(left, right) < count  # two mirrored keypoints match if the plain ones do
        left, right = left[is_plain], right[is_plain]
        mirrored = np.maximum(left, right) >= count
        left, right = left % count, right % count
        left, right = np.minimum(left, right), np.maximum(left, right)
        matches = np.column_stack([left, 2 * right + mirrored]).astype(np.uint64)
        one, other = self._numbers(matches)
        return matches[one != other]

    def _numbers(self, matches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the two images of each match among those that are searched, the lower one first."""
        left, right, _ = _split_matches(matches)
        one, other = (np.searchsorted(self.starts, at, "right") - 1 for at in (left, right))
        return one, other

    def _store(self, name: str, matches: np.ndarray) -> None:
        """Add matches to the files of a table, one for each block of images."""
        one, _ = self._numbers(matches)
        for block, some in split_rows(matches, one // IMAGES_AT_ONCE):
            append_rows(self.scratch / f"{name}{block}", some)

    def join(self, parents: np.ndarray, table: str) -> None:
        """Join the clusters of images that overlap, by the matches of this table and of those before it."""
        roots = find_roots(parents).copy()
        parents[:] = roots
        checks: Counter[int] = Counter()
        for block in range(-(-len(self.images) // IMAGES_AT_ONCE)):
            pending = self.scratch / f"pending{block}"
            matches = np.concatenate(
                [take_rows(path, 2) for path in (pending, self.scratch / f"{table}{block}")]
            )
            one, other = self._numbers(matches)
            matches = _unique_rows(matches[roots[self.images[one]] != roots[self.images[other]]])
            append_rows(pending, matches)
            for first, second, pair_matches in self._pairs(matches, checks):
                roots_of = [find_root(parents, int(self.images[number])) for number in (first, second)]
                if roots_of[0] != roots_of[1] and self._overlap(first, second, pair_matches):
                    parents[max(roots_of)] = min(roots_of)

    def _pairs(self, matches: np.ndarray, checks: Counter[int]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Pairs of images with enough matches, and their matches; pairs with most matches first."""
        one, other = self._numbers(matches)
        order = np.lexsort((other, one))
        one, other = one[order], other[order]
        first = np.flatnonzero(differ_from_last(np.column_stack([one, other])))
        counts = np.diff(np.append(first, len(order)))
        for at in np.argsort(-counts, kind="stable"):
            if counts[at] < MIN_MATCHES:
                return
            pair = int(one[first[at]]), int(other[first[at]])
            if max(checks[image] for image in pair) < MAX_CHECKS:
                checks.update(pair)
                yield *pair, matches[order[first[at] : first[at] + min(counts[at], MAX_MATCHES)]]

    def _overlap(self, one: int, other: int, matches: np.ndarray) -> bool:
        """Whether two images overlap, by their matches."""
        left, right, mirrored = _split_matches(matches)
        left, right = left - self.starts[one], right - self.starts[other]
        first, second = (unpack(self.packed[int(self.images[number])]) for number in (one, other))
        return overlap_share(first, second, left, right, mirrored) >= MIN_OVERLAP


def _split_matches(matches: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two positions of each match, int64, and whether one is mirrored: (m,) each."""
    left, right = matches.astype(np.int64).T
    return left, right >> 1, right & 1 == 1


def _unique_rows(matches: np.ndarray) -> np.ndarray:
    """The different ones of (m, 2), sorted."""
    matches = matches[np.lexsort((matches[:, 1], matches[:, 0]))]
    return matches[differ_from_last(matches)]


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
