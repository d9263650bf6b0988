"""Checks of a training command that need no PyTorch, so that mistakes are reported at once."""

import os
from pathlib import Path
from typing import Any, NewType

from vae.config.options import Config
from vae.config.recipes import recipe_values
from vae.config.resolve import (
    check_batch,
    check_encoder,
    check_length,
    parse_progressive,
    resolve,
    split_progressive,
)
from vae.data.exclude_list import read_exclude_list
from vae.data.manifest import is_manifest
from vae.images.decoding import parse_background
from vae.images.folder import check_images
from vae.interop.vae_path import check_checkpoint_path, locate_vae
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.shards.mixture import parse_mixture
from vae.system.errors import UserError
from vae.training.output.run_folder import (
    check_run_folder,
    checkpoint_paths,
    contains_run,
    resume_command,
)
from vae.training.output.wandb_run import check_wandb_installed

Given = dict[str, Any]  # option values by name, as the user gave them
Checked = NewType("Checked", Given)  # by `check_command`


def check_command(given: Given) -> Checked:
    """Raise UserError for mistakes in the `given` options, as far as they are known without PyTorch."""
    _check_options(given)
    resumed = given.get("resume_from")
    if given.get("init_from") and not resumed:  # giving both is another mistake
        locate_vae(Path(given["init_from"]), "--init_from")
    if resumed not in (None, "latest"):
        check_checkpoint_path(Path(resumed), "--resume_from")
    _check_output(given)
    _check_images(given)
    if given.get("exclude"):
        read_exclude_list(given["exclude"])
    if given.get("wandb"):
        check_wandb_installed()
    return Checked(given)


def _check_images(given: Given) -> None:
    """Raise UserError if a folder of images is missing, empty or contains the output."""
    data_path = given.get("data_path", Config().data.data_path)
    resumed = given.get("resume_from")
    begins = resumed is None or (resumed == "latest" and not checkpoint_paths(output_folder(given)))
    if begins and resumed and "data_path" not in given and not os.path.exists(data_path):
        raise UserError(
            f"--resume_from latest: there is no checkpoint in --output_dir {output_folder(given)}: give the "
            "folder of a run, or --data_path to begin one"
        )
    folders = {name: given[name] for name in ("val_path", "sample_images") if given.get(name)}
    if ("data_path" in given or begins) and not is_manifest(data_path):
        folders = {"data_path": data_path, **folders}
    mixture = [path for path, _ in parse_mixture(folders.get("data_path", ""))]
    for path in mixture:
        read_dataset(path)
    if mixture:
        del folders["data_path"]
    for name, folder in folders.items():
        if name != "sample_images" and is_dataset(folder):
            read_dataset(folder, flag=f"--{name}")
            continue
        check_images(folder, flag=f"--{name}")
        _check_apart(output_folder(given), f"--{name}", folder)


def _check_apart(output_dir: Path, flag: str, images: str) -> None:
    """Raise UserError if the run would write its sample grids into a folder of images."""
    if Path(os.path.realpath(output_dir)).is_relative_to(os.path.realpath(images)):
        raise UserError(
            f"--output_dir {output_dir} is inside {flag} {images}, so the sample grids of the run would "
            "become images of it: give a folder outside"
        )


def _check_options(given: Given) -> None:
    """Check the options themselves; across options only if no file and no device adds others."""
    name, progressive = given.get("profile"), given.get("progressive")
    recipe = recipe_values(name, has_gpu=False) if name else None
    parse_background(given.get("background", Config().data.background))
    check_length(given)
    check_batch(given)
    if progressive:
        split_progressive(progressive)
    if given.get("resume_from") or given.get("init_from") or name == "demo":  # demo depends on the device
        return
    config = resolve(given, profile=recipe)
    check_encoder(config, given)
    if progressive:
        parse_progressive(progressive, config.model)


def output_folder(given: Given) -> Path:
    """The output folder of the `given` options; a checkpoint of --resume_from implies its own folder."""
    resumed = given.get("resume_from")
    implied = Config().run.output_dir if resumed in (None, "latest") else Path(resumed).parent
    return Path(given.get("output_dir", implied))


def _check_output(given: Given) -> None:
    """Raise UserError if the output folder cannot be written, is of others or contains another run.

    With --resume_from latest, the run in the folder is this run, even if it stopped before its first
    checkpoint.
    """
    resumed, folder = given.get("resume_from"), output_folder(given)
    check_run_folder(folder)
    if resumed == "latest" or (resumed and Path(resumed).parent.resolve() == folder.resolve()):
        return
    if contains_run(folder):
        raise UserError(
            f"--output_dir {folder} contains another run: use a new folder, or resume that run: "
            f"{resume_command(folder)}"
        )
