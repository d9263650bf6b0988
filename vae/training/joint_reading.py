"""What the processes of a run read of its images together, for --exclude and --buckets: each a share."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vae.config.options import Config, DataConfig
from vae.data.dataset import FolderImages
from vae.data.exclude_list import Excluded, ExcludeList, read_exclude_list, refuse_unmatched
from vae.data.image_sets import find_excluded, image_sizes, manifest_sizes
from vae.data.manifest import is_manifest
from vae.sampling.buckets import aspects
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.training.datasets import TrainingSet
from vae.training.distributed import Distributed
from vae.training.validation.measure import ValidationSet


def with_aspects(training_set: TrainingSet, config: Config, dist: Distributed) -> TrainingSet:
    """The training set with the aspects of a folder that --buckets needs; each process reads a share."""
    images, data = training_set.images, config.data
    if not data.buckets or not isinstance(images, FolderImages):
        return training_set
    measured = _measured_aspects(images, data.data_path, dist)
    return replace(training_set, aspects=np.frombuffer(measured, dtype=np.float32))


def _measured_aspects(images: FolderImages, data_path: str, dist: Distributed) -> bytes:
    indices = np.array_split(np.arange(len(images)), dist.world_size)[dist.rank]

    def measure() -> bytes:
        known = manifest_sizes(data_path, images.names) if is_manifest(data_path) else {}
        return aspects(image_sizes(images, indices, known)).tobytes()

    return b"".join(results_by_rank(measure, dist))


def results_by_rank(read: Callable[[], bytes], dist: Distributed) -> list[bytes]:
    """What each process reads; DataError in all of them if one cannot."""
    own, failure = b"", None
    try:
        own = read()
    except UserError as error:
        failure = error
    if dist.all_reduce_scalars(failure is not None)[0]:
        raise failure or DataError("another process cannot read what it needs of the images: it says why")
    parts = dict(dist.all_gather_set({(dist.rank, own)}))
    return [parts[rank] for rank in range(dist.world_size)]


def without_excluded(
    training_set: TrainingSet, validation_set: ValidationSet | None, data: DataConfig, dist: Distributed
) -> tuple[TrainingSet, ValidationSet | None]:
    """Both sets without the images that --exclude names; DataError if one of them has no other images."""
    if data.exclude is None:
        return training_set, validation_set
    keys = read_exclude_list(data.exclude)
    training = _excluded(training_set, keys, data.data_path, dist)
    _check_rest(len(training_set.images), training, data, "training")
    count = 0
    matched = len(training.indices)
    if validation_set is not None:
        validation = _excluded(validation_set, keys, data.val_path or data.data_path, dist)
        matched += len(validation.indices)
        own = validation.indices
        validation = replace(validation, indices=own[own < validation_set.count])
        _check_rest(validation_set.count, validation, data, "validation")
        validation_set = replace(validation_set, excluded=validation)
        count = len(validation.indices)
    if not matched:
        refuse_unmatched(keys)
    console.info(f"exclude {len(training.indices)} training and {count} validation images are left out")
    return replace(training_set, excluded=training), validation_set


def _excluded(
    images_of: TrainingSet | ValidationSet, keys: ExcludeList, path: str, dist: Distributed
) -> Excluded:
    """The excluded images of a set; each process reads a share."""
    manifest = path if is_manifest(path) else None

    def find() -> bytes:
        found = find_excluded(images_of.images, keys, manifest, dist.rank, dist.world_size)
        return found.astype(np.int64).tobytes()

    parts = [np.frombuffer(part, np.int64) for part in results_by_rank(find, dist)]
    return Excluded(np.unique(np.concatenate(parts)), keys.sha256)


def _check_rest(count: int, excluded: Excluded, data: DataConfig, name: str) -> None:
    if count and len(excluded.indices) == count:
        raise DataError(f"--exclude {data.exclude} has all {count} {name} images: leave some of them out")
