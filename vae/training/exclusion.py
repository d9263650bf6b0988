"""The images that --exclude names are left out of training and validation; all processes look for them."""

from dataclasses import replace

import numpy as np

from vae.config.options import DataConfig
from vae.data.exclude_list import Excluded, ExcludeList, read_exclude_list, unmatched_text
from vae.data.excluding import find_excluded
from vae.data.manifest import is_manifest
from vae.system import console
from vae.system.errors import DataError
from vae.training.datasets import TrainingSet
from vae.training.distributed import Distributed
from vae.training.joint_reading import results_by_rank
from vae.training.validation.measure import ValidationSet


def without_excluded(
    training_set: TrainingSet, validation_set: ValidationSet | None, data: DataConfig, dist: Distributed
) -> tuple[TrainingSet, ValidationSet | None]:
    """Both sets without the images that --exclude names; DataError if one of them has no other images."""
    if data.exclude is None:
        return training_set, validation_set
    keys = read_exclude_list(data.exclude)
    training, matched = _excluded(training_set, keys, data.data_path, dist)
    _check_rest(len(training_set.images), training, data, "training")
    validation = Excluded(sha256=keys.sha256, keys=len(keys))
    if validation_set is not None:
        path = data.val_path or data.data_path
        validation, others = _excluded(validation_set, keys, path, dist)
        own = validation.indices
        validation = replace(validation, indices=own[own < validation_set.count])
        _check_rest(validation_set.count, validation, data, "validation")
        validation_set = replace(validation_set, excluded=validation)
        matched = np.union1d(matched, others)
    console.info(
        f"exclude {len(training.indices)} training and {len(validation.indices)} validation images are left "
        f"out{unmatched_text(keys, matched)}"
    )
    return replace(training_set, excluded=training), validation_set


def _excluded(
    images_of: TrainingSet | ValidationSet, keys: ExcludeList, path: str, dist: Distributed
) -> tuple[Excluded, np.ndarray]:
    """The excluded images of a set, and the numbers of their keys; each process reads a share."""
    manifest = path if is_manifest(path) else None

    def find() -> bytes:
        indices, numbers = find_excluded(images_of.images, keys, manifest, dist.rank, dist.world_size)
        return np.concatenate([[len(indices)], indices, numbers]).astype(np.int64).tobytes()

    found = [np.frombuffer(one, np.int64) for one in results_by_rank(find, dist)]
    indices = np.unique(np.concatenate([one[1 : 1 + one[0]] for one in found]))
    numbers = np.unique(np.concatenate([one[1 + one[0] :] for one in found]))
    return Excluded(indices, keys.sha256, len(keys), len(numbers)), numbers


def _check_rest(count: int, excluded: Excluded, data: DataConfig, name: str) -> None:
    if count and len(excluded.indices) == count:
        raise DataError(f"--exclude {data.exclude} has all {count} {name} images: leave some of them out")
