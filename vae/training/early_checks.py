"""A training command and its checks that need no PyTorch, so that mistakes are reported at once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, permutations
from pathlib import Path
from typing import Any

from vae.config.declare import OptionValues
from vae.config.flags import command_words
from vae.config.options import Config, all_options
from vae.config.recipes import recipe_values
from vae.config.resolve import PER_COMMAND, check_encoder, check_given, parse_progressive, resolve
from vae.data.exclude_list import read_exclude_list
from vae.data.manifest import is_manifest, manifest_of
from vae.images.decoding import parse_background
from vae.images.folder import check_images
from vae.interop.vae_path import check_checkpoint_path, locate_vae
from vae.prepare.hub_dataset import local_dataset
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.shards.hub_files import is_hub_dataset
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.errors import UserError
from vae.system.files import check_folder, check_utf8
from vae.training.run_folder import RUN_COMMAND, checkpoint_paths, contains_run

# These options say what a command begins, and where.
_OF_START = {
    *("config", "find_lr", "find_lr_steps", "init_from", "new_stage", "output_dir", "profile", "progressive"),
    "resume_from",
}


@dataclass(frozen=True)
class Command:
    """The options that a user gave, as flags or in --config; a checkpoint, profile or card may add others."""

    given: OptionValues

    @classmethod
    def of(cls, given: OptionValues) -> "Command":
        """Make a command; its default --output_dir is the folder of the checkpoint of --resume_from."""
        resumed = given.get("resume_from")
        if resumed not in (None, "latest"):
            given = {"output_dir": str(Path(resumed).parent), **given}
        return cls(given)

    def value(self, name: str) -> Any:
        """The given value of an option, or its default."""
        return self.given[name] if name in self.given else all_options()[name][1].default

    @property
    def output_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.value("output_dir"))

    @property
    def resume_from(self) -> str | None:
        """A checkpoint, "latest", or None for a new run."""
        return self.value("resume_from")

    @property
    def resume_command(self) -> str:
        """The command that resumes the run, with the given options that no checkpoint stores."""
        kept = {name: value for name, value in self.given.items() if name in PER_COMMAND - _OF_START}
        options = {"output_dir": str(self.output_dir), "resume_from": "latest", **kept}
        return console.command_line("python", "train_vae.py", *command_words(options))

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that --resume_from names."""
        return Path(self.resume_from) if self.resume_from not in (None, "latest") else None


def check_command(given: OptionValues) -> Command:
    """The command with these options; UserError for mistakes, as far as they are known without PyTorch."""
    command = Command.of(given)
    _check_options(command)
    if command.value("init_from") and not command.resume_from:  # giving both is another mistake
        locate_vae(Path(command.value("init_from")), "--init_from")
    if command.value("teacher"):
        locate_vae(Path(command.value("teacher")), "--teacher")
    if command.checkpoint:
        check_checkpoint_path(command.checkpoint)
    _check_output(command)
    command = Command(with_local_datasets(command.given))
    _check_images(command)
    if command.value("exclude"):
        read_exclude_list(command.value("exclude"))
    if command.value("wandb"):
        check_wandb_installed()
    return command


def with_local_datasets(given: OptionValues) -> OptionValues:
    """The options with a local dataset.json instead of each dataset of the hub, as the run records them."""
    options = dict(given)
    cache_dir = given.get("cache_dir")
    data_path = given.get("data_path", ())
    val_path = given.get("val_path")
    if any(map(is_hub_dataset, data_path)):
        share = 0.0
        if not val_path:
            share = given.get("val_split", Config().data.val_split)
            options.pop("val_split", None)  # the shards have that validation set
        options["data_path"] = tuple(
            local_dataset(path, "--data_path", cache_dir, share) if is_hub_dataset(path) else path
            for path in data_path
        )
    if val_path and is_hub_dataset(val_path):
        options["val_path"] = local_dataset(val_path, "--val_path", cache_dir)
    return options


def _check_images(command: Command) -> None:
    """Raise UserError if a folder of images is missing, empty or contains the output."""
    data_path = command.value("data_path")
    folder = command.output_dir
    is_given = "data_path" in command.given
    begins = not command.resume_from or (command.resume_from == "latest" and not checkpoint_paths(folder))
    if begins and command.resume_from and not is_given and not os.path.exists(data_path[0]):
        raise UserError(
            f"--resume_from latest: there is no checkpoint in --output_dir {folder}: give the folder of a "
            "run, or --data_path to begin one"
        )
    sets = [(name, command.value(name)) for name in ("val_path", "sample_images") if command.value(name)]
    if (is_given or begins) and not manifest_of(data_path):
        _check_one_kind(data_path)
        sets = [*(("data_path", path) for path in data_path), *sets]
    for name, path in sets:
        if name != "sample_images" and is_dataset(path):
            read_dataset(path, flag=f"--{name}")
            continue
        check_images(path, flag=f"--{name}")
        _check_apart(folder, f"--{name}", path)


def _check_one_kind(data_path: Sequence[str]) -> None:
    """Raise UserError unless all paths are folders, or all datasets, and none contains another."""
    shown = f"--data_path {' '.join(data_path)}"
    if len(data_path) > 1 and (any(map(is_manifest, data_path)) or len({*map(is_dataset, data_path)}) > 1):
        raise UserError(f"{shown}: several are read as one if all are folders, or all a dataset.json")
    local = [Path(os.path.realpath(path)) for path in data_path if not is_remote(path)]
    inside = (inner for inner, outer in permutations(local, 2) if inner.is_relative_to(outer))
    twice = (path for path in data_path if data_path.count(path) > 1)
    if path := next(chain(inside, twice), None):
        raise UserError(f"{shown} names {path} twice: give it once")


def _check_apart(output_dir: Path, flag: str, images: str) -> None:
    """Raise UserError if the run would write its sample grids into a folder of images."""
    if Path(os.path.realpath(output_dir)).is_relative_to(os.path.realpath(images)):
        raise UserError(
            f"--output_dir {output_dir} is inside {flag} {images}, so the sample grids of the run would "
            "become images of it: give a folder outside"
        )


def _check_options(command: Command) -> None:
    """Check the options themselves; across options only if no file and no device adds others."""
    given = command.given
    profile = command.value("profile")
    progressive = command.value("progressive")
    recipe = recipe_values(profile, has_gpu=False) if profile else None
    parse_background(command.value("background"))
    check_given(given)
    if progressive:
        parse_progressive(progressive)
    by_files = any(command.value(name) for name in ("resume_from", "init_from", "teacher"))
    if by_files or profile == "demo":  # demo depends on the device
        return
    config = resolve(given, profile=recipe)
    check_encoder(config, given)
    if progressive:
        parse_progressive(progressive, config.model)


def _check_output(command: Command) -> None:
    """Raise UserError if the output folder cannot be written, is of others or contains another run.

    With --resume_from latest, the run in the folder is this run, even if it stopped before its first
    checkpoint.
    """
    folder, checkpoint = command.output_dir, command.checkpoint
    check_utf8(folder, "--output_dir", "PyTorch and TensorBoard")
    check_folder(folder, RUN_COMMAND)
    if command.resume_from == "latest" or (checkpoint and checkpoint.parent.resolve() == folder.resolve()):
        return
    if contains_run(folder):
        raise UserError(
            f"--output_dir {folder} contains another run: use a new one, or resume: {command.resume_command}"
        )


def check_wandb_installed() -> None:
    """Raise UserError if the package is missing."""
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder `wandb` with the files of earlier runs is no package
        raise UserError("--wandb needs the package wandb: pip install wandb, or use --no-wandb")
