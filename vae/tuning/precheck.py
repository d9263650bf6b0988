"""Checks of a command of tune_vae.py before Optuna is imported, and the defaults of the search."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.flags import read_json
from vae.config.options import Config, all_options
from vae.config.recipes import recipe_values
from vae.config.resolve import resolve
from vae.config.tune_flags import TuneConfig
from vae.data.manifest import is_manifest
from vae.shards.dataset_json import is_dataset
from vae.system import console
from vae.system.errors import UserError
from vae.system.folder_marker import check_folder
from vae.training.precheck import check_command as check_training
from vae.tuning.presets import PRESETS, preset
from vae.tuning.space import Space, check_space, read_space, start_values

COMMAND = "tune"  # in the markers of its folders
INSTALL = "pip install -r requirements-tune.txt"
# Options of a whole command: the search sets them for each trial.
_OF_COMMAND = ("output_dir", "resume_from", "new_stage", "find_lr", "find_lr_steps", "find_lr_seeds")


class Base(NamedTuple):
    """The defaults of a search, and what is searched around them."""

    options: dict[str, Any]  # for --config
    config: Config
    space: Space


def check_command(config: TuneConfig) -> Base:
    """The defaults and the space; raises UserError for everything that is wrong with the command."""
    if find_spec("optuna") is None:
        raise UserError(f"tune_vae.py needs optuna: run {INSTALL}")
    folder = Path(config.output_dir)
    check_folder(folder, COMMAND)
    options = _defaults(config)
    base = resolve(options, profile=_profile(options))
    _check_length(options, base)
    check_training({**options, "output_dir": str(folder / "trials" / "new")})
    _check_held_out(base)
    if config.space in PRESETS:
        space, left_out = preset(config.space, base)
        if left_out:
            console.info(
                f"--space {config.space} leaves out what the defaults switch off: {', '.join(left_out)}"
            )
    else:
        space = read_space(Path(config.space))
    if (
        "learning_rate" in space and base.optim.learning_rate is None
    ):  # the rule has no number for all lengths
        options["learning_rate"] = start_values(base)["learning_rate"]
        base = resolve(options, profile=_profile(options))
    check_space(space, base, config.objective, config.space)
    return Base(options, base, space)


def _defaults(config: TuneConfig) -> dict[str, Any]:
    """The options of every trial, without those of a command; the split of the images stays the same."""
    options = read_json(Path(config.config)) if config.config else {}
    if config.data_path is not None:
        options["data_path"] = config.data_path
    options = {name: value for name, value in options.items() if name not in _OF_COMMAND}
    if options.get("split_seed") is None:
        options["split_seed"] = options.get("seed", all_options()["seed"][1].default)
    return options


def _profile(options: dict[str, Any]) -> dict[str, Any] | None:
    return recipe_values(options["profile"], has_gpu=False) if options.get("profile") else None


def _check_length(options: dict[str, Any], base: Config) -> None:
    if base.run.train_minutes is not None:
        raise UserError(
            '--config: "train_minutes" makes the length of a trial depend on the speed of the moment: give '
            '"num_epochs" instead'
        )
    if options.get("progressive"):
        raise UserError('--config: "progressive" has stages of several sizes: search one stage at a time')


def _check_held_out(base: Config) -> None:
    data = base.data
    split = data.val_split > 0 or data.fold is not None or data.val_path
    if not split and not is_manifest(data.data_path) and not is_dataset(data.data_path):
        raise UserError(
            '--config: "val_split" 0 leaves no images to compare trials on: give "val_split" 0.1, or '
            '"val_path"'
        )
