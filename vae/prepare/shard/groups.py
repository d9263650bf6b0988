"""Groups of images that look alike: a group is in one subset, so validation has no twin of a training image.

Perceptual hashes are sorted on disk. Memory is needed for at most 64 bytes per image.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from vae.images.folder import count_lowest
from vae.prepare.disk_blocks import map_file, scratch_folder
from vae.prepare.ledger import Ledger, Result
from vae.prepare.near_duplicates import cluster_sorted, near_between, sort_different

PHASH_BYTES = 16  # two big-endian words
EXAMPLES, MAX_NAMES = 2, 6  # groups and images that a message names


class Groups:
    """The groups of all accepted images, and a 64-bit key of each group.

    The key of a single image is the beginning of the hash of its bytes. That of a larger group is a hash of
    the lowest of these, so larger groups are not drawn more often.
    """

    def __init__(self, ledger: Ledger, scratch: Path):
        """Sort the hashes in the ledger, and find groups; `scratch` is a file."""
        firsts = array("Q")  # by image
        with scratch_folder(scratch.with_suffix(".tmp")) as folder:
            with (folder / "phashes").open("wb") as file:
                for result in ledger.accepted_by_hash():
                    file.write(bytes.fromhex(result.record["phash"]))
                    firsts.append(hash_number(result))
            numbers = sort_different(map_file(folder / "phashes", ">u8", 2), scratch)
            self._phashes = map_file(scratch, f"S{PHASH_BYTES}", 1)[:, 0]
            words = self._phashes.view(">u8").reshape(-1, 2)
            self._group_of = cluster_sorted(words, folder)  # (U,): by the position of a hash
        groups = self._group_of[numbers]  # by image
        self.sizes = np.bincount(groups, minlength=len(words))  # images by group
        self._keys = np.full(len(words), 2**64 - 1, np.uint64)  # by group
        self._keys[groups[::-1]] = np.frombuffer(firsts, np.uint64)[::-1]  # the lowest is assigned last
        for group in np.flatnonzero(self.sizes > 1):
            digest = hashlib.sha256(int(self._keys[group]).to_bytes(8, "big")).digest()
            self._keys[group] = int.from_bytes(digest[:8], "big")

    def position(self, result: Result) -> int:
        """The position of an image's hash among all."""
        return int(np.searchsorted(self._phashes, np.bytes_(bytes.fromhex(result.record["phash"]))))

    def group(self, result: Result) -> int:
        """The number of an image's group."""
        return int(self._group_of[self.position(result)])

    def held_out(self, share: float) -> np.ndarray:
        """Which groups are for validation: about a share of the images, and never all of them: bool by group.

        Groups that are larger than this share train, unless no smaller one is left to choose.
        """
        exists = self.sizes > 0
        keys = np.sort(np.repeat(self._keys, self.sizes))  # by image
        lowest, highest = count_lowest(cast("Sequence[int]", keys), share), self._keys[exists].max(initial=0)
        if lowest == 0 or exists.sum() < 2:
            return np.zeros(len(exists), bool)
        kept = exists & (self._keys <= keys[lowest - 1]) & (self.sizes <= lowest) & (self._keys < highest)
        if not kept.any():
            smallest = np.flatnonzero(self.sizes == self.sizes[exists].min())
            kept[smallest[self._keys[smallest].argmin()]] = True
        return kept

    def near(self, others: Iterable[np.ndarray]) -> np.ndarray:
        """Which hashes are near one of other images, whose (N, 2) hashes come in parts: bool by position."""
        words = self._phashes.view(">u8").reshape(-1, 2).astype(np.uint64)
        is_near = np.zeros(len(words), bool)
        for part in others:
            for ours, _theirs in near_between(words, part):
                is_near[ours] = True
        return is_near

    def touched(self, near: np.ndarray) -> np.ndarray:
        """Which groups have one of these hashes: bool by group."""
        is_touched = np.zeros(len(self.sizes), bool)
        is_touched[self._group_of[near]] = True
        return is_touched


def split_groups(
    groups: Groups,
    subsets: Callable[[], Iterator[tuple[Result, bool]]],
    old: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[str]:
    """Names of the images of some groups that have images in both subsets; none if no group has.

    `subsets` gives all images, each with whether it is for validation. `old`: which groups have more images
    for training, and for validation.
    """
    seen = np.zeros(len(groups.sizes), np.uint8)  # by group: 1 for training, 2 for validation, 3 for both
    if old:
        seen |= old[0] | 2 * old[1].astype(np.uint8)
    for result, held_out in subsets():
        seen[groups.group(result)] |= 1 + held_out
    both = set(np.flatnonzero(seen == 3)[:EXAMPLES].tolist())
    names = (result.name for result, _ in subsets() if both and groups.group(result) in both)
    return sorted(islice(names, MAX_NAMES))


def hash_number(result: Result) -> int:
    """The beginning of the hash of an image's bytes."""
    assert result.sha256 is not None, "accepted files have a hash"
    return int(result.sha256[:16], 16)
