"""The labelled images of a probe, from shards, folders or a CSV file, and their folds.

Shapes: N labelled images, K classes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vae.config.evaluate_flags import EvaluateConfig
from vae.data.dataset import Images
from vae.data.manifest import group_key, is_manifest, read_rows
from vae.evaluation.image_set import label_text, open_source
from vae.evaluation.precheck import validation_path
from vae.images.formats import BadImageError
from vae.prepare.split.metadata_csv import read_table
from vae.progress import track
from vae.shards.shard_cache import open_cache
from vae.shards.shard_images import ShardImages
from vae.shards.store import StoreFile
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError, UserError

NAME_COLUMNS = ("path", "image", "filepath", "filename", "id")


class Label(NamedTuple):
    """The label of an image; group and fold are None if they are not given."""

    text: str
    group: Any = None
    fold: Any = None


@dataclass(frozen=True)
class LabelledSet:
    """The labelled images of a folder or a dataset of shards."""

    flag: str  # --data_path or --val_path
    images: Images
    indices: np.ndarray  # int64 (N,), numbers of the labelled images
    labels: list[Label]
    targets: np.ndarray  # int64 (N,), of the sorted classes
    groups: np.ndarray  # int64 (N,); images of one group are always in one fold

    def names(self, positions: np.ndarray) -> list[str]:
        """Names of the labelled images at these positions."""
        return [self.images.name(index) for index in self.indices[positions].tolist()]

    def fingerprint(self) -> str:
        """A hash of the images and of their order."""
        return hashlib.sha256(self.images.fingerprint().encode() + self.indices.tobytes()).hexdigest()


def read_sets(config: EvaluateConfig) -> tuple[list[str], list[LabelledSet]]:
    """The sorted classes, and the labelled images: of --data_path, and of --val_path with --probe_profile.

    Raises DataError or UserError in one line if they cannot be probed.
    """
    paths: dict[str, str | StoreFile] = {"--data_path": config.path}
    if config.probe_profile is not None:
        paths["--val_path"] = validation_path(config)
    cache = open_cache((config.path, config.val_path), config.cache_dir, config.cache_gib)
    sources = {flag: open_source(path, flag, cache) for flag, path in paths.items()}
    listed = None if config.probe is None else _listed_labels(config.probe, config.probe_column)
    if listed is not None:
        _check_listed(f"--probe {config.probe}", listed, sources)
    labels_of = {flag: _labels_of(flag, images, config, listed) for flag, images in sources.items()}
    classes = _classes(
        {
            f"{flag} {sources[flag].location}": {label.text for label in labels.values()}
            for flag, labels in labels_of.items()
        }
    )
    _warn_of_twins(list(sources.values()))
    number_of = {name: number for number, name in enumerate(classes)}
    sets = [
        LabelledSet(
            flag,
            sources[flag],
            np.array(list(labels), dtype=np.int64),
            list(labels.values()),
            np.array([number_of[label.text] for label in labels.values()], dtype=np.int64),
            _numbers([label.group or f"image/{number}" for number, label in enumerate(labels.values())]),
        )
        for flag, labels in labels_of.items()
    ]
    return classes, sets


def _listed_labels(path: str, column: str) -> dict[str, Label]:
    """The labels in a CSV file or a manifest by image. DataError if it cannot be read, or has one twice."""
    labels: dict[str, Label] = {}
    for name, label in _manifest_rows(path, column) if is_manifest(path) else _csv_rows(path, column):
        if name in labels:
            raise DataError(f"--probe {path} lists {printable(name)} twice: keep one of these rows")
        labels[name] = label
    if not labels:
        raise DataError(f"--probe {path} has no labels in the column {column}: give at least two classes")
    return labels


def _manifest_rows(path: str, column: str) -> Iterator[tuple[str, Label]]:
    for row in read_rows(path, flag="--probe"):
        if row.get(column) is not None:
            yield row["path"], Label(str(row[column]), group_key(row), row.get("fold"))


def _csv_rows(path: str, column: str) -> Iterator[tuple[str, Label]]:
    header, rows = read_table(path, "--probe", needed=())
    key = next((name for name in NAME_COLUMNS if name in header), None)
    if key is None or column not in header:
        raise UserError(
            f"--probe {path} needs a column {column} (--probe_column) and one of {', '.join(NAME_COLUMNS)}, "
            f"and has {', '.join(map(printable, header)) or 'none'}: rename them"
        )
    for number, values in enumerate(rows, 2):
        row = dict(zip(header, values, strict=True))
        if row[column] and not row[key]:
            raise DataError(f"--probe {path}: line {number} has a label and no {key}: add it")
        if row[column]:
            yield row[key], Label(row[column], row.get("group") or None, row.get("fold") or None)


def _check_listed(probe: str, listed: dict[str, Label], sources: dict[str, Images]) -> None:
    """Raise DataError if --probe names images that do not exist, or that are in both sets."""
    counts = Counter(
        name for images in sources.values() for name in map(images.name, range(len(images))) if name in listed
    )
    unknown, twice = sorted(listed.keys() - counts), [name for name, count in counts.items() if count > 1]
    if unknown:
        raise DataError(
            f"{probe}: {len(unknown)} of its {len(listed)} images are not in {' or '.join(sources)}, for "
            f"example {printable(unknown[0])}: remove these rows, or give their folder"
        )
    if twice:
        raise DataError(
            f"{probe}: {printable(twice[0])} is in {' and in '.join(sources)}, so its label is not clear: "
            "rename one of them"
        )


def _labels_of(
    flag: str, images: Images, config: EvaluateConfig, listed: dict[str, Label] | None
) -> dict[int, Label]:
    """The label of each labelled image by its number. DataError without any."""
    labels: dict[int, Label] = {}
    missing = ""
    try:
        for index in track(range(len(images)), f"labels of {flag}", len(images), "image", keep=False):
            label = _label_of(images, index, config.probe_column, listed)
            if label is not None:
                labels[index] = label
            missing = missing or (images.name(index) if label is None else "")
    except BadImageError as error:
        raise DataError(f"{flag} {images.location}: the labels cannot be read: {error}") from error
    if not labels:
        remedy = (
            f"name a column with --probe_column ({config.probe_column}; folder: the name of each image's "
            "folder), or give --probe labels.csv"
        )
        if listed is not None:
            remedy = f"add rows for them to --probe {config.probe}"
        raise DataError(f"{flag} {images.location} has no labels, for example {printable(missing)}: {remedy}")
    if missing:
        console.warning(
            f"{flag} {images.location}: {len(images) - len(labels)} of {len(images)} images have no label "
            f"and are left out, for example {printable(missing)}"
        )
    return labels


def _label_of(images: Images, index: int, column: str, listed: dict[str, Label] | None) -> Label | None:
    """The label of an image: from --probe, the JSON files of shards, or the folders."""
    if listed is not None:
        return listed.get(images.name(index))
    text = label_text(images, index, column)
    return None if text is None else Label(text)


def _classes(labels: dict[str, set[str]]) -> list[str]:
    """The sorted classes, from the labels of the training images and of the validation images."""
    (train, known), *others = labels.items()
    classes = sorted(known)
    if len(classes) < 2:
        raise DataError(f"{train} has only the class {printable(classes[0])}: give at least two classes")
    for val, measured in others:
        strange = sorted(measured - known)
        if strange:
            raise DataError(
                f"{val} has {len(strange)} classes that --data_path lacks, for example "
                f"{printable(strange[0])}: remove these images, or add some to --data_path"
            )
        if len(measured) < len(classes):
            console.warning(f"{val} lacks {len(classes) - len(measured)} of {len(classes)} classes")
    return classes


def _warn_of_twins(sources: Sequence[Images]) -> None:
    """Warn if image files are in both sets: the key of a shard's image is the hash of its file."""
    keys = [
        np.concatenate([rows["key"] for rows in images.indexes()])
        for images in sources
        if isinstance(images, ShardImages)
    ]
    twins = len(np.intersect1d(keys[0], keys[1])) if len(keys) == 2 else 0
    if twins:
        console.warning(
            f"{twins} image files of --val_path are also in --data_path: the scores will be too good"
        )


def folds_of(labelled: LabelledSet, classes: Sequence[str], probe: str, num_folds: int) -> np.ndarray:
    """The fold of each image, int64 (N,): that of --probe if each has one, otherwise by scikit-learn."""
    from sklearn.model_selection import StratifiedGroupKFold

    targets, groups = labelled.targets, labelled.groups
    given = [label.fold for label in labelled.labels if label.fold is not None]
    if len(given) == len(targets):
        folds = _numbers(given)
        _check_folds(labelled, classes, probe, folds)
        return folds
    if given:
        console.info(f"{probe}: {len(given)} of {len(targets)} images have a fold: all get a new one")
    counts = Counter(target for target, _ in set(zip(targets.tolist(), groups.tolist(), strict=True)))
    rarest = min(counts, key=lambda target: counts[target])
    if counts[rarest] < num_folds:
        raise DataError(
            f"{probe}: the class {printable(classes[rarest])} has images of {counts[rarest]} groups, "
            f"fewer than --probe_folds {num_folds}: add images, or "
            f"{f'lower --probe_folds to {counts[rarest]}' if counts[rarest] > 1 else 'remove the class'}"
        )
    folds = np.zeros(len(targets), dtype=np.int64)
    splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
    for fold, (_, measured) in enumerate(splitter.split(targets, targets, groups)):
        folds[measured] = fold
    return folds


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """The values numbered by their order."""
    return np.unique([str(value) for value in values], return_inverse=True)[1]


def _check_folds(labelled: LabelledSet, classes: Sequence[str], probe: str, folds: np.ndarray) -> None:
    """Raise DataError for a group in several folds, and for a class in only one, that is never trained on."""
    first: dict[int, int] = {}
    for number, (group, fold) in enumerate(zip(labelled.groups.tolist(), folds.tolist(), strict=True)):
        if folds[first.setdefault(group, number)] != fold:
            names = labelled.names(np.array([first[group], number]))
            raise DataError(
                f"{probe}: {' and '.join(map(printable, names))} are of one group but in different folds: "
                "split again, or remove the column fold"
            )
    for target, name in enumerate(classes):
        if len(set(folds[labelled.targets == target].tolist())) == 1:
            raise DataError(
                f"{probe}: all images of the class {printable(name)} are in one fold, so it cannot be "
                "trained on and measured: add images, remove the class, or remove the column fold"
            )
