"""The training and validation images of a run, from a folder or a manifest."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vae.config.errors import UserError
from vae.config.options import Config
from vae.data.dataset import FolderDataset
from vae.data.folder import list_images, split_names
from vae.data.manifest import MANIFEST_NAME, check_files, image_root, is_manifest, train_and_val
from vae.training.validation import ValidationSet


@dataclass(frozen=True)
class TrainingSet:
    """The training image files of a run: names relative to `root`."""

    root: Path
    names: list[str]

    def fingerprint(self) -> str:
        """SHA-256 of the names: a run resumes in the same order only if they have not changed."""
        return hashlib.sha256("\n".join(self.names).encode("utf-8", "surrogateescape")).hexdigest()

    def crops(self, config: Config, image_size: int) -> FolderDataset:
        """The dataset of training crops of `image_size` px."""
        data = config.data
        return FolderDataset(
            self.root,
            self.names,
            image_size=image_size,
            crop=data.crop,
            horizontal_flip=data.horizontal_flip,
            upscale=data.upscale,
            background=data.background,
            max_pixels=data.max_pixels,
            seed=config.run.seed,
        )


def find_images(config: Config, given: dict[str, Any]) -> tuple[TrainingSet, ValidationSet | None]:
    """The training set and the validation set; None if nothing is set aside for validation."""
    data = config.data
    if is_manifest(data.data_path):
        train, validation = _images_of_manifest(config, "val_split" in given)
    elif data.fold is not None:
        raise UserError(
            f"--fold {data.fold} needs a manifest with folds: use --data_path "
            f"{Path(data.data_path) / MANIFEST_NAME}"
        )
    else:
        names = list_images(data.data_path)
        share = 0.0 if data.val_path else data.val_split
        train, validation = split_names(names, share, config.run.seed)
    root = Path(image_root(data.data_path))
    validation_root = root
    if data.val_path:
        validation_root, validation = Path(data.val_path), list_images(data.val_path, flag="--val_path")
    if data.max_val_images:
        validation = validation[: data.max_val_images]
    return TrainingSet(root, train), ValidationSet(validation_root, validation) if validation else None


def _images_of_manifest(config: Config, val_split_given: bool) -> tuple[list[str], list[str]]:
    """Training and validation names. Validation images of the manifest are never used for training."""
    data = config.data
    if data.fold is not None and data.val_path:
        raise UserError(
            f"--fold {data.fold} and --val_path {data.val_path} both define a validation set: remove one"
        )
    train, validation = train_and_val(
        data.data_path,
        fold=data.fold,
        val_split=0.0 if data.val_path else data.val_split,
        seed=config.run.seed,
        val_split_given=val_split_given,
    )
    check_files(data.data_path, sorted(train + validation))
    return train, validation
