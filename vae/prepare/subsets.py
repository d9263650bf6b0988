"""Validation subset and fold of each group of images: pure functions of hashes and labels.

Shapes: N images, G groups, C cells; a cell contains the images of one label in one group.
"""

from dataclasses import dataclass

import numpy as np

from vae.images.folder import SMALL_SET
from vae.system.errors import UserError

NONE = -1  # no subset yet, no fold
TRAIN, VAL = 0, 1
# scikit-learn takes 10 s for 100,000 images, and its time grows faster than their number. Above this number
# of images, the large counts alone keep the folds balanced.
MAX_FOR_SCIKIT = 20_000


@dataclass
class Groups:
    """The groups in the order of their hashes, the group of each image, and the images of each label."""

    hashes: np.ndarray  # uint64 (G,), ascending
    of_image: np.ndarray  # int64 (N,)
    label_counts: np.ndarray  # int64 (labels,)
    cell_starts: np.ndarray  # int64 (G + 1,)
    cell_labels: np.ndarray  # int64 (C,)
    cell_sizes: np.ndarray  # int64 (C,)

    @property
    def sizes(self) -> np.ndarray:
        """Images of each group: int64 (G,)."""
        return np.bincount(self.of_image, minlength=len(self.hashes))

    def cells(self) -> list[list[tuple[int, int]]]:
        """The (label, images) pairs of each group."""
        pairs = list(zip(self.cell_labels.tolist(), self.cell_sizes.tolist(), strict=True))
        starts = self.cell_starts.tolist()
        return [pairs[starts[group] : starts[group + 1]] for group in range(len(self.hashes))]


def gather(keys: np.ndarray, labels: np.ndarray) -> Groups:
    """Groups from the images' group hashes, uint64 (N,), and label numbers, (N,)."""
    hashes, of_image = np.unique(keys, return_inverse=True)
    number = int(labels.max(initial=0)) + 1
    cells, sizes = np.unique(of_image * number + labels, return_counts=True)
    return Groups(
        hashes=hashes,
        of_image=of_image,
        label_counts=np.bincount(labels, minlength=number),
        cell_starts=np.searchsorted(cells, np.arange(len(hashes) + 1) * number),
        cell_labels=cells % number,
        cell_sizes=sizes,
    )


def earlier_choice(groups: Groups, earlier: np.ndarray) -> np.ndarray:
    """The earlier subset or fold of each group, from its images' ones, int (N,): int64 (G,), NONE if unknown.

    If joined groups had different ones, the lowest is used. A subset then becomes TRAIN, since no image that
    was trained on may be in the validation set.
    """
    unknown = np.iinfo(np.int64).max
    lowest = np.full(len(groups.hashes), unknown)
    known = earlier != NONE
    np.minimum.at(lowest, groups.of_image[known], earlier[known].astype(np.int64))
    return np.where(lowest == unknown, NONE, lowest)


def choose_val_groups(groups: Groups, share: float, earlier: np.ndarray) -> np.ndarray:
    """Which groups are in the validation set: bool (G,). Values of `earlier`, (G,), other than NONE are kept.

    With at least 1000 groups and one label, these are the groups whose hash is below a threshold, so that a
    subset depends on nothing else. Otherwise, the set contains the share of each label as closely as the
    groups allow, lowest hashes first.
    """
    if len(groups.hashes) < 2:
        raise UserError(
            f"--val_split {share}: all images are one group, which cannot be divided: "
            "choose another --group_by, or --val_split 0"
        )
    if len(groups.hashes) >= SMALL_SET and len(groups.label_counts) == 1:
        below = groups.hashes < np.uint64(share * 2**64)
        return np.where(earlier == NONE, below, earlier == VAL)
    in_val = _fill_quotas(groups, share, earlier)
    if not in_val.any() and (earlier == NONE).any():  # at least one: the smallest group with the lowest hash
        sizes = np.where(earlier == NONE, groups.sizes, np.iinfo(np.int64).max)
        in_val[np.argmin(sizes)] = True
    if in_val.all():  # never all
        in_val[np.flatnonzero(earlier == NONE)[-1:]] = False
    return in_val


def _fill_quotas(groups: Groups, share: float, earlier: np.ndarray) -> np.ndarray:
    cells, in_val = groups.cells(), earlier == VAL
    missing = (groups.label_counts * share).tolist()  # images of each label still to be added
    for group in np.flatnonzero(in_val).tolist():
        for label, size in cells[group]:
            missing[label] -= size
    free = np.flatnonzero(earlier == NONE).tolist()
    for group in free:
        # adding the group reduces the sum of squared distances to the quotas
        if sum(size * (size - 2 * missing[label]) for label, size in cells[group]) < 0:
            in_val[group] = True
            for label, size in cells[group]:
                missing[label] -= size
    if len(missing) == 1:
        return in_val
    # Labels with few images may have no image in the set. Together they lack some: add at most a group each.
    total = sum(missing)
    for group in free:
        size = sum(size for _, size in cells[group])
        if not in_val[group] and size < 2 * total and all(missing[label] > 0 for label, _ in cells[group]):
            in_val[group] = True
            total -= size
            for label, part in cells[group]:
                missing[label] -= part
    return in_val


def deal_folds(
    groups: Groups, num_folds: int, earlier: np.ndarray, left_out: np.ndarray, seed: int
) -> np.ndarray:
    """Fold of each group: int64 (G,), NONE if `left_out`. Values of `earlier`, (G,), except NONE are kept.

    With at least 1000 groups and one label, the hash alone decides. Labelled sets of up to 20,000 images use
    scikit-learn's StratifiedGroupKFold. In larger sets, and when images are added later, each group goes to
    the fold that lacks its labels most.
    """
    folds = np.where(left_out, NONE, earlier)
    free = ~left_out & (earlier == NONE)
    dealt = int((~left_out).sum())
    if dealt < num_folds:
        raise UserError(f"--num_folds {num_folds} is more than the {dealt} groups: lower it")
    one_label = len(groups.label_counts) == 1
    if one_label and len(groups.hashes) >= SMALL_SET:
        spread = (groups.hashes & np.uint64(0xFFFFFFFF)) * np.uint64(num_folds) >> np.uint64(32)
        return np.where(free, spread.astype(np.int64), folds)
    if not one_label and len(groups.of_image) <= MAX_FOR_SCIKIT and np.array_equal(free, ~left_out):
        return _fold_by_scikit(groups, num_folds, left_out, seed)
    return _fold_by_need(groups, num_folds, folds, free)


def _fold_by_scikit(groups: Groups, num_folds: int, left_out: np.ndarray, seed: int) -> np.ndarray:
    try:
        from sklearn.model_selection import StratifiedGroupKFold
    except ModuleNotFoundError as error:
        raise UserError(
            f"--num_folds {num_folds} with labels needs scikit-learn ({error.name} is not installed): "
            "python -m pip install scikit-learn"
        ) from None
    import warnings

    cell_group = np.repeat(np.arange(len(groups.hashes)), np.diff(groups.cell_starts))
    rows = np.repeat(cell_group, groups.cell_sizes)  # one per image
    labels = np.repeat(groups.cell_labels, groups.cell_sizes)
    kept = ~left_out[rows]
    rows, labels = rows[kept], labels[kept]
    folds = np.full(len(groups.hashes), NONE)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # about labels with fewer images than folds: the summary shows the counts
        splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=seed % 2**32)
        for fold, (_, chosen) in enumerate(splitter.split(rows, labels, rows)):
            folds[rows[chosen]] = fold
    return folds


def _fold_by_need(groups: Groups, num_folds: int, folds: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Assign groups, largest first, each to the fold with the smallest shares of the group's labels."""
    folds, cells = folds.copy(), groups.cells()
    counts = groups.label_counts.tolist()
    filled = [[0.0] * len(counts) for _ in range(num_folds)]  # share of each label in each fold
    totals = [0] * num_folds
    for group in np.flatnonzero(folds != NONE).tolist():
        _add_shares(cells[group], filled[folds[group]], counts)
        totals[folds[group]] += sum(size for _, size in cells[group])
    order = np.flatnonzero(free)
    for group in order[np.argsort(-groups.sizes[order], kind="stable")].tolist():
        pairs = cells[group]
        need = [(sum(size * row[label] for label, size in pairs), totals[i]) for i, row in enumerate(filled)]
        best = min(range(num_folds), key=need.__getitem__)
        folds[group] = best
        _add_shares(pairs, filled[best], counts)
        totals[best] += sum(size for _, size in pairs)
    return folds


def _add_shares(pairs: list[tuple[int, int]], filled: list[float], counts: list[int]) -> None:
    for label, size in pairs:
        filled[label] += size / counts[label]
