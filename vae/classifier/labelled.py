"""The labelled images of a recipe: training and validation, from shards or folders.

Shapes: N labelled images, K classes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from vae.config.evaluate_flags import EvaluateConfig
from vae.data.dataset import FolderImages, Images
from vae.evaluation.precheck import validation_path
from vae.evaluation.probe.labels import label_rows
from vae.images.folder import list_images
from vae.images.formats import BadImageError
from vae.progress import track
from vae.shards.index import is_dataset, read_dataset
from vae.shards.remote_shards import open_images
from vae.shards.shard_cache import ShardCache, open_cache
from vae.shards.shard_images import ShardImages
from vae.shards.store import StoreFile
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError

FOLDER = "folder"  # as --probe_column: the name of the folder of each image, as in ImageNet

LabelOf = Callable[[int], str | None]  # of an image by its number


@dataclass(frozen=True)
class LabelledSet:
    """The labelled images of a folder or a dataset of shards."""

    flag: str  # --data_path or --val_path
    images: Images
    indices: np.ndarray  # int64 (N,), numbers of the labelled images
    targets: np.ndarray  # int64 (N,), of the sorted classes

    def fingerprint(self) -> str:
        """A hash of the images and of their order."""
        return hashlib.sha256(self.images.fingerprint().encode() + self.indices.tobytes()).hexdigest()


def read_sets(config: EvaluateConfig) -> tuple[list[str], LabelledSet, LabelledSet]:
    """The sorted classes, the training set and the validation set.

    Raises DataError or UserError in one line if they cannot be trained on.
    """
    paths = {"--data_path": config.data_path, "--val_path": validation_path(config)}
    cache = open_cache((config.data_path, config.val_path), config.cache_dir, config.cache_gib)
    sources = {flag: _open(path, flag, cache) for flag, path in paths.items()}
    listed = _listed_labels(config)
    if listed is not None:
        _check_listed(config, listed, sources)
    texts = {flag: _texts(flag, images, config, listed) for flag, images in sources.items()}
    classes = _classes(
        {f"{flag} {sources[flag].location}": set(found.values()) for flag, found in texts.items()}
    )
    _warn_of_twins(sources)
    number_of = {name: number for number, name in enumerate(classes)}
    sets = [
        LabelledSet(
            flag,
            images,
            np.array(list(texts[flag]), dtype=np.int64),
            np.array([number_of[text] for text in texts[flag].values()], dtype=np.int64),
        )
        for flag, images in sources.items()
    ]
    return classes, sets[0], sets[1]


def _classes(labels: dict[str, set[str]]) -> list[str]:
    """The sorted classes, from the labels of the training set and the validation set by their names."""
    (train, known), (val, found) = labels.items()
    classes = sorted(known)
    if len(classes) < 2:
        raise DataError(f"{train} has only the class {printable(classes[0])}: give at least two classes")
    strange = sorted(found - known)
    if strange:
        raise DataError(
            f"{val} has {len(strange)} classes that --data_path lacks, for example {printable(strange[0])}: "
            "remove these images, or add some to --data_path"
        )
    if len(found) < len(classes):
        console.warning(f"{val} lacks {len(classes) - len(found)} of {len(classes)} classes")
    return classes


def _open(path: str | StoreFile, flag: str, cache: ShardCache | None) -> Images:
    if isinstance(path, StoreFile) or is_dataset(path):
        return open_images(read_dataset(path, flag=flag), 1, cache)
    return FolderImages(path, list_images(path, flag=flag))


def _listed_labels(config: EvaluateConfig) -> dict[str, str] | None:
    """The labels in --probe by image; None without it."""
    if config.probe is None:
        return None
    rows = label_rows(config.probe, config.probe_column)
    return {name: str(label) for name, (label, _, _) in rows.items()}


def _check_listed(config: EvaluateConfig, listed: dict[str, str], sources: dict[str, Images]) -> None:
    """Raise DataError if --probe names images that do not exist, or that are in both sets."""
    train, val = (
        {name for name in map(images.name, range(len(images))) if name in listed}
        for images in sources.values()
    )
    unknown, twice = sorted(listed.keys() - train - val), sorted(train & val)
    if unknown:
        raise DataError(
            f"--probe {config.probe}: {len(unknown)} of its {len(listed)} images are neither in --data_path "
            f"nor in --val_path, for example {printable(unknown[0])}: remove these rows, or give their folder"
        )
    if twice:
        raise DataError(
            f"--probe {config.probe}: {printable(twice[0])} is in --data_path and in --val_path, so its "
            "label is not clear: rename one of them"
        )


def _texts(
    flag: str, images: Images, config: EvaluateConfig, listed: dict[str, str] | None
) -> dict[int, str]:
    """The label of each labelled image by its number. DataError without any."""
    label_of = _label_reader(images, config.probe_column, listed)
    found: dict[int, str] = {}
    missing = ""
    try:
        for index in track(range(len(images)), f"labels of {flag}", len(images), "image", keep=False):
            label = label_of(index)
            if label is not None:
                found[index] = label
            missing = missing or (images.name(index) if label is None else "")
    except BadImageError as error:
        raise DataError(f"{flag} {images.location}: the labels cannot be read: {error}") from error
    remedy = (
        f"name a column with --probe_column ({config.probe_column}; folder: the name of each image's "
        "folder), or give --probe labels.csv"
    )
    if listed is not None:
        remedy = f"add rows for them to --probe {config.probe}"
    if not found:
        raise DataError(f"{flag} {images.location} has no labels, for example {printable(missing)}: {remedy}")
    if missing:
        console.warning(
            f"{flag} {images.location}: {len(images) - len(found)} of {len(images)} images have no label and "
            f"are left out, for example {printable(missing)}"
        )
    return found


def _label_reader(images: Images, column: str, listed: dict[str, str] | None) -> LabelOf:
    """The label of an image: from --probe, the JSON files of shards, or the folders."""
    if listed is not None:
        return lambda index: listed.get(images.name(index))
    if isinstance(images, ShardImages):

        def of_shard(index: int) -> str | None:
            content = images.metadata(index)
            if column == FOLDER and column not in content:
                return _folder_of(str(content.get("source", "")))
            label = content.get(column)
            return None if label in (None, "") else str(label)

        return of_shard
    if column == FOLDER:
        return lambda index: _folder_of(images.name(index))
    return lambda _index: None


def _folder_of(name: str) -> str | None:
    return PurePosixPath(name).parent.name or None


def _warn_of_twins(sources: dict[str, Images]) -> None:
    """Warn if image files are in both sets: the key of a shard's image is the hash of its file."""
    train, val = sources.values()
    if not isinstance(train, ShardImages) or not isinstance(val, ShardImages):
        return
    keys = [np.concatenate([rows["key"] for rows in images.indexes()]) for images in (train, val)]
    twins = len(np.intersect1d(keys[0], keys[1]))
    if twins:
        console.warning(
            f"{twins} image files of --val_path are also in --data_path: the scores will be too good"
        )
