"""Images that two datasets of shards share: with the same bytes, or that look alike.

Memory is needed for the index of the second dataset, and for parts of equal length of the first.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vae.prepare.near_duplicates import near_between
from vae.shards.shard_images import ShardImages

MIN_ROWS = 2**18  # that are compared at once


class SharedImage(NamedTuple):
    """An image of the validation set, and one of the training set that it equals or looks like."""

    key: str
    training_key: str

    @property
    def is_equal(self) -> bool:
        """Whether both have the same bytes."""
        return self.key == self.training_key


def find_shared(training: ShardImages, validation: ShardImages) -> list[SharedImage]:
    """One for each shared image of `validation`, in the order of their keys. BadImageError for a bad index.

    A dataset that was written with --no-near_duplicates is compared by keys alone.
    """
    validation_rows = np.concatenate(list(validation.indexes()))
    validation_rows = validation_rows[np.argsort(validation_rows["key"])]
    allowed = any(one.dataset.policy.get("near_duplicates") is False for one in (training, validation))
    pairs: dict[bytes, bytes] = {}
    for rows in parts(training.indexes(), max(MIN_ROWS, len(validation_rows))):
        if not allowed:
            for ours, theirs in near_between(phashes_of(rows), phashes_of(validation_rows)):
                for our, their in zip(ours.tolist(), theirs.tolist(), strict=True):
                    pairs.setdefault(validation_rows["key"][their], rows["key"][our])
        for key in np.intersect1d(rows["key"], validation_rows["key"]):
            pairs[key] = key
    texts = ((key.decode("ascii", "replace") for key in pair) for pair in pairs.items())
    return sorted(SharedImage(*pair) for pair in texts)


def parts(indexes: Iterator[np.ndarray], least: int) -> Iterator[np.ndarray]:
    """The rows of several indexes together, at least so many but for the last part."""
    part: list[np.ndarray] = []
    for rows in indexes:
        part.append(rows)
        if sum(map(len, part)) >= least:
            yield np.concatenate(part)
            part = []
    if part:
        yield np.concatenate(part)


def phashes_of(rows: np.ndarray) -> np.ndarray:
    """The perceptual hashes of an index: uint64 (N, 2)."""
    return np.stack([rows["phash_low"], rows["phash_high"]], axis=1)
