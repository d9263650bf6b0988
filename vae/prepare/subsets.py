"""Validation subset and fold of each group of images: pure functions of hashes and labels.

Shapes: N images, G groups, C cells; a cell contains the images of one label in one group.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from vae.images.folder import SMALL_SET
from vae.system.errors import UserError

NONE = -1  # no fold


@dataclass
class Groups:
    """The groups in the order of their hashes, the group of each image, and the images of each label."""

    hashes: np.ndarray  # uint64 (G,), ascending
    of_image: np.ndarray  # int64 (N,)
    labels: np.ndarray  # int64 (N,)
    sizes: np.ndarray  # int64 (G,): images of each group
    label_counts: np.ndarray  # int64 (labels,)

    @property
    def is_by_hash(self) -> bool:
        """Whether the hashes of the groups alone decide: without labels, many of them give every share."""
        return len(self.hashes) >= SMALL_SET and len(self.label_counts) == 1

    @cached_property
    def cells(self) -> list[list[tuple[int, int]]]:
        """(label, images) pairs of each group."""
        count = len(self.label_counts)
        cells, sizes = np.unique(self.of_image * count + self.labels, return_counts=True)  # (C,) each
        starts = np.searchsorted(cells, np.arange(len(self.hashes) + 1) * count).tolist()
        pairs = list(zip((cells % count).tolist(), sizes.tolist(), strict=True))
        return [pairs[start:end] for start, end in pairwise(starts)]


def gather(keys: np.ndarray, labels: np.ndarray | None = None) -> Groups:
    """Groups from the images' group hashes, uint64 (N,), and label numbers, (N,)."""
    labels = np.zeros(len(keys), np.int64) if labels is None else labels
    hashes, of_image, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return Groups(hashes, of_image, labels, sizes, np.bincount(labels))


def choose_val_groups(groups: Groups, share: float) -> np.ndarray:
    """Which groups are in the validation set: bool (G,).

    With at least 1000 groups and one label, these are the groups whose hash is below a threshold, so that a
    subset depends on nothing else; groups larger than the whole share train. Otherwise, the set contains the
    share of each label as closely as the groups allow, lowest hashes first.
    """
    if len(groups.hashes) < 2:
        raise UserError(
            f"--val_split {share}: all images are one group, which cannot be divided: "
            "choose another --group_by, or --val_split 0"
        )
    if groups.is_by_hash:
        return (groups.hashes < np.uint64(share * 2**64)) & (groups.sizes <= share * groups.sizes.sum())
    in_val = _fill_quotas(groups, share)
    if not in_val.any():  # at least one: the smallest group with the lowest hash
        in_val[np.argmin(groups.sizes)] = True
    if in_val.all():  # never all
        in_val[-1] = False
    return in_val


def _fill_quotas(groups: Groups, share: float) -> np.ndarray:
    in_val = np.zeros(len(groups.hashes), bool)
    missing = (groups.label_counts * share).tolist()  # images of each label still to be added

    def take(group: int) -> None:
        in_val[group] = True
        for label, size in groups.cells[group]:
            missing[label] -= size

    for group, cells in enumerate(groups.cells):
        # adding the group reduces the sum of squared distances to the quotas
        if sum(size * (size - 2 * missing[label]) for label, size in cells) < 0:
            take(group)
    # Labels with few images may have no image in the set. Together they lack some: add at most a group each.
    for group, cells in enumerate(groups.cells) if len(missing) > 1 else ():
        is_lacking = all(missing[label] > 0 for label, _ in cells)
        if not in_val[group] and is_lacking and groups.sizes[group] < 2 * sum(missing):
            take(group)
    return in_val


def deal_folds(groups: Groups, num_folds: int, left_out: np.ndarray) -> np.ndarray:
    """Fold of each group: int64 (G,), NONE if `left_out`.

    With at least 1000 groups and one label, the hash alone decides. Otherwise each group, the largest first,
    goes to the fold with the smallest shares of its labels.
    """
    if (count := int((~left_out).sum())) < num_folds:
        raise UserError(f"--num_folds {num_folds} is more than the {count} groups: lower it")
    if groups.is_by_hash:
        spread = (groups.hashes & np.uint64(0xFFFFFFFF)) * np.uint64(num_folds) >> np.uint64(32)
        return np.where(left_out, NONE, spread.astype(np.int64))
    folds = np.full(len(groups.hashes), NONE)
    shares = np.zeros((num_folds, len(groups.label_counts)))  # of each label in each fold
    totals = np.zeros(num_folds)
    order = np.argsort(-groups.sizes, kind="stable")
    for group in order[~left_out[order]].tolist():
        labels, sizes = np.array(groups.cells[group]).T
        fold = np.lexsort((totals, shares[:, labels] @ sizes))[0]
        folds[group] = fold
        shares[fold, labels] += sizes / groups.label_counts[labels]
        totals[fold] += sizes.sum()
    return folds
