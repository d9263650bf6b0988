"""Which images a run trains on and which are held out: from a folder, or as a manifest says."""

from pathlib import Path
from typing import Any

from vae.config.errors import UserError
from vae.config.options import Config
from vae.data.dataset import FolderDataset
from vae.data.folder import list_images, split_names
from vae.data.manifest import MANIFEST_NAME, check_files, image_root, is_manifest, train_and_val
from vae.training.validation_set import Held


def choose_images(config: Config, given: dict[str, Any]) -> tuple[list[str], Held | None]:
    """Names to train on, and the held-out images."""
    data = config.data
    if is_manifest(data.data_path):
        train, held_names = _listed_images(config, "val_split" in given)
    elif data.fold is not None:
        raise UserError(
            f"--fold {data.fold} needs folds, which a manifest has: give it as "
            f"--data_path {Path(data.data_path) / MANIFEST_NAME}"
        )
    else:
        names = list_images(data.data_path)
        share = 0.0 if data.val_path else data.val_split
        train, held_names = split_names(names, share, config.run.seed)
    held = Held(image_root(data.data_path), held_names) if held_names else None
    if data.val_path:
        held = Held(Path(data.val_path), list_images(data.val_path, flag="--val_path"))
    if held and data.max_val_images:
        held.names = held.names[: data.max_val_images]
    return train, held


def _listed_images(config: Config, val_split_given: bool) -> tuple[list[str], list[str]]:
    """What a manifest says; an image it holds out is never trained on, whatever validates."""
    data = config.data
    if data.fold is not None and data.val_path:
        raise UserError(f"--fold {data.fold} and --val_path {data.val_path} both validate: drop one of them")
    train, held = train_and_val(
        data.data_path,
        fold=data.fold,
        val_split=0.0 if data.val_path else data.val_split,
        seed=config.run.seed,
        val_split_given=val_split_given,
    )
    check_files(data.data_path, sorted(train + held))
    return train, held


def train_dataset(config: Config, names: list[str], image_size: int) -> FolderDataset:
    """The training crops of `image_size` px of the listed images."""
    data = config.data
    return FolderDataset(
        image_root(data.data_path),
        names,
        image_size=image_size,
        crop=data.crop,
        horizontal_flip=data.horizontal_flip,
        upscale=data.upscale,
        background=data.background,
        max_pixels=data.max_pixels,
        seed=config.run.seed,
    )
