"""Actions of train_vae.py instead of training: --save_config and --plan."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vae.config.options import RECOMPUTE, Config, LossConfig, flatten
from vae.device import pick_device
from vae.memory.plan_table import ProfilePlan, Target, find_target, plan_profile, print_table
from vae.system import console
from vae.system.console import counted
from vae.system.errors import UserError
from vae.system.files import write_json
from vae.training.datasets import check_stage
from vae.training.early_checks import Command
from vae.training.resolved_options import machine_of, resolve_options
from vae.training.stages import Position, Stage, stages_left


def save_config(command: Command, path: str) -> None:
    """Resolve the options of a command and write all of them to `path`; UserError if something is wrong.

    The file contains no reference to other files of options, because it replaces them.
    """
    file = Path(path)
    if os.path.lexists(file):
        raise UserError(f"--save_config {file} exists: use another name, or delete it first")
    options = resolve_options(command, *machine_of(pick_device(command.value("device"))))
    values = flatten(options.config)
    del values["config"], values["profile"]  # their options are in the file
    if options.content is not None:  # --resume_from, which excludes it, has its weights
        del values["init_from"]
    if "val_split" not in command.given:  # given with a manifest that is split already, it is an error
        del values["val_split"]
    try:
        write_json(file, values, indent=2)
    except OSError as error:
        raise UserError(f"--save_config {file} cannot be written: {error.strerror}") from None
    words = console.command_line("python", "train_vae.py", "--config", file)
    console.info(f"{file}: {len(values)} options; nothing was trained. Train with: {words}")


def print_stage_plans(command: Command, gpu: str | None = None, vram_gib: float | None = None) -> None:
    """Print each stage of the command that is left, as chosen and at each other recompute level.

    The card is that of `find_target`. Raises UserError if something is wrong.
    """
    target = find_target(gpu, vram_gib)
    options = resolve_options(command, target.is_gpu, target.settings)
    later = stages_left(options.stages, options.position)
    first = len(options.stages) - len(later) + 1
    left = {number: _at_stage(options.config, stage) for number, stage in enumerate(later, first)}
    print_table(target, _plans(left, target), "stage")
    for number, stage in enumerate(later, first):
        begins = _discriminator_text(options.config.loss, options.position)
        console.info(f"stage {number}: {_length_text(stage)}{begins}")


def _length_text(stage: Stage) -> str:
    if stage.num_steps is not None:
        return counted(stage.num_steps, "step")
    assert stage.num_epochs is not None
    return counted(stage.num_epochs, "epoch")


def _discriminator_text(loss: LossConfig, position: Position) -> str:
    """When the discriminator begins; how many steps an epoch has is not known without the images."""
    if not loss.adversarial_weight:
        return ""
    if loss.disc_start < 1 and position.disc_begun_at is None:
        return f"; the discriminator begins after {loss.disc_start:.0%} of the steps of the first stage"
    step = position.disc_begun_at if loss.disc_start < 1 else int(loss.disc_start)
    return f"; the discriminator begins at step {step} of the run"


def _at_stage(config: Config, stage: Stage) -> Config:
    check_stage(config, stage)
    return replace(
        config,
        data=replace(config.data, image_size=stage.image_size),
        run=replace(config.run, batch_size=stage.batch_size),
    )


def _plans(configs: dict[int, Config], target: Target) -> Iterator[ProfilePlan]:
    for number, config in configs.items():
        chosen = plan_profile(f"{number}", config, target)
        yield chosen
        for level in RECOMPUTE:
            if level != chosen.recompute and config.speed.recompute == "auto":
                speed = replace(config.speed, recompute=level)
                yield plan_profile("  or", replace(config, speed=speed), target)
