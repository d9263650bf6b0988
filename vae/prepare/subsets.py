"""Validation subset and fold of each group of images: by the hashes of the groups, or stratified by labels.

Shapes: N images, G groups.
"""

import warnings
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from vae.images.folder import SMALL_SET
from vae.system.errors import UserError

NONE = -1  # no fold
MAX_DENOMINATOR = (
    20  # a share of a stratified set is that of some of at most so many folds, if it is not smaller
)


@dataclass
class Groups:
    """The groups in the order of their hashes, the group of each image, and the images of each label."""

    hashes: np.ndarray  # uint64 (G,), ascending
    of_image: np.ndarray  # int64 (N,)
    labels: np.ndarray  # int64 (N,)
    sizes: np.ndarray  # int64 (G,): images of each group
    label_counts: np.ndarray  # int64 (labels,)


def gather(keys: np.ndarray, labels: np.ndarray | None = None) -> Groups:
    """Groups from the images' group hashes, uint64 (N,), and label numbers, (N,)."""
    labels = np.zeros(len(keys), np.int64) if labels is None else labels
    hashes, of_image, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return Groups(hashes, of_image, labels, sizes, np.bincount(labels))


def choose_val_groups(groups: Groups, share: float) -> np.ndarray:
    """Which groups are in the validation set: bool (G,).

    Without labels, groups larger than the whole share train. With at least 1000 groups, those validate whose
    hash is below a threshold, so that nothing else decides a subset; of fewer, those with the lowest hashes.
    """
    if len(groups.hashes) < 2:
        raise UserError(
            f"--val_split {share}: all images are one group, which cannot be divided: "
            "choose another --group_by, or --val_split 0"
        )
    images = share * groups.sizes.sum()
    fits = groups.sizes <= images
    if len(groups.label_counts) > 1:
        count = len(groups.hashes)
        part = Fraction(share).limit_denominator(min(MAX_DENOMINATOR, count))
        if part == 0:
            part = Fraction(1, min(round(1 / share), count))
        elif part == 1:
            part = 1 - Fraction(1, min(round(1 / (1 - share)), count))
        folds = _stratified(groups, part.denominator, np.ones(count, bool))
        in_val = (folds >= 0) & (folds < part.numerator)
    elif len(groups.hashes) >= SMALL_SET:
        return fits & (groups.hashes < np.uint64(share * 2**64))
    else:
        in_val = fits & (np.cumsum(groups.sizes * fits) - groups.sizes / 2 < images)
    if not in_val.any():  # at least one: the smallest group with the lowest hash
        in_val[np.argmin(groups.sizes)] = True
    if in_val.all():  # never all
        in_val[-1] = False
    return in_val


def deal_folds(groups: Groups, num_folds: int, left_out: np.ndarray) -> np.ndarray:
    """Fold of each group: int64 (G,), NONE if `left_out`.

    With at least 1000 groups and one label, the hash alone decides. Otherwise the folds are stratified.
    """
    if (count := int((~left_out).sum())) < num_folds:
        raise UserError(f"--num_folds {num_folds} is more than the {count} groups: lower it")
    if len(groups.hashes) >= SMALL_SET and len(groups.label_counts) == 1:
        spread = (groups.hashes & np.uint64(0xFFFFFFFF)) * np.uint64(num_folds) >> np.uint64(32)
        return np.where(left_out, NONE, spread.astype(np.int64))
    return _stratified(groups, num_folds, ~left_out)


def _stratified(groups: Groups, num_folds: int, chosen: np.ndarray) -> np.ndarray:
    """Fold of each of the `chosen` groups, with equal shares of all images and of each label: int64 (G,)."""
    try:
        from sklearn.model_selection import StratifiedGroupKFold
    except ImportError:
        raise UserError(
            "labels, and folds of fewer than 1000 groups, need the package scikit-learn: "
            "python -m pip install scikit-learn"
        ) from None
    images = np.flatnonzero(chosen[groups.of_image])
    # A label with fewer images than folds cannot be in all of them: such labels are divided as one.
    is_rare = np.bincount(groups.labels[images], minlength=len(groups.label_counts)) < num_folds
    labels = np.where(is_rare, -1, np.arange(len(is_rare)))[groups.labels[images]]
    folds = np.full(len(groups.hashes), NONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the rare labels
        divided = StratifiedGroupKFold(num_folds).split(images, labels, groups.of_image[images])
        for fold, (_, own) in enumerate(divided):
            folds[groups.of_image[images[own]]] = fold
    return folds
