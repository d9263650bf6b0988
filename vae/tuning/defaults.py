"""Checks of a command of tune_vae.py before Optuna is imported, and the defaults of the search."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.flags import read_json
from vae.config.options import Config, all_options
from vae.config.recipes import recipe_values
from vae.config.resolve import resolve, with_local_batch
from vae.config.tune_flags import TuneConfig
from vae.device import pick_device
from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import UserError
from vae.system.folder_marker import check_folder
from vae.training.command import Command
from vae.training.command import check_command as check_training
from vae.training.datasets import TrainingSet, ValidationSet, find_images
from vae.training.distributed import Distributed
from vae.training.joint_reading import without_excluded
from vae.training.resolved_options import machine_of, resolve_options
from vae.training.schedule import StageSchedule
from vae.training.stages import StageSteps, first_stages
from vae.tuning.presets import PRESETS, preset
from vae.tuning.space import Space, check_space, read_space

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
    _check_length(options)
    command = check_training({**options, "output_dir": str(folder / "trials" / "new")})
    sets = find_images(base, val_split_given="val_split" in options)
    _check_validation(base, sets[1])
    space = None if config.space in PRESETS else read_space(Path(config.space))
    if base.optim.learning_rate is None and (space is None or "learning_rate" in space):
        rate = learning_rate_of(command, *sets)
        options["learning_rate"] = space["learning_rate"].nearest(rate) if space else rate
        base = resolve(options, profile=_profile(options))
    if space is None:
        space, left_out = preset(config.space, base)
        if left_out:
            console.info(
                f"--space {config.space} leaves out what the defaults switch off: {', '.join(left_out)}"
            )
    check_space(space, base, config.objective, config.space)
    return Base(options, base, space)


def _check_validation(config: Config, validation: ValidationSet | None) -> None:
    """Raise UserError if the trials would have no validation images."""
    if validation is None:
        raise UserError(
            f"--data_path {public_text(config.data.data_path)}: no image is set aside for validation, "
            'so trials cannot be compared: give "val_split" 0.1 in --config, "val_path", or more images'
        )


def learning_rate_of(
    command: Command, training_set: TrainingSet, validation_set: ValidationSet | None
) -> float:
    """The peak learning rate that this command trains with on one device, with its sets of images."""
    dist = Distributed(0, 1, pick_device(command.value("device") or "auto"))
    options = resolve_options(command, *machine_of(dist.device))
    config = with_local_batch(options.config, 1)
    training_set, _ = without_excluded(training_set, validation_set, config.data, dist)
    (stage,) = first_stages(config)
    steps = StageSteps.of(stage, training_set.num_images, config.run.accumulation_steps, world_size=1)
    if not steps.total:
        raise UserError(
            f"--batch_size {stage.batch_size} is more than the {training_set.num_images} training images: "
            "lower it in --config or add images"
        )
    return StageSchedule(steps, options.begun_from, config.model.widest, config.optim, config.loss).peak


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


def _check_length(options: dict[str, Any]) -> None:
    if options.get("progressive"):
        raise UserError('--config: "progressive" has stages of several sizes: search one stage at a time')
