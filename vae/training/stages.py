"""Stages of a run and the position within them: pure functions that decide what a command goes on with.

A stage is one resolution of a run: its first epoch, number of epochs, image size and batch. Epochs count
from 0 over all stages here, from 1 in file names.
"""

from dataclasses import dataclass, replace
from typing import Any

from vae.config.errors import UserError
from vae.config.options import Config
from vae.config.resolve import parse_progressive


@dataclass(frozen=True)
class Stage:
    """Epochs [first_epoch, end_epoch) at one image size (px) and batch (images per device)."""

    first_epoch: int
    num_epochs: int
    image_size: int
    batch_size: int

    @property
    def end_epoch(self) -> int:
        return self.first_epoch + self.num_epochs


@dataclass
class Position:
    """How far a run has come; `images_in_epoch` counts indices passed, used or not, over all processes."""

    epoch: int = 0
    images_in_epoch: int = 0
    step: int = 0  # optimizer steps of the autoencoder, over the whole run
    images: int = 0  # indices passed, over the whole run


def first_stages(config: Config) -> list[Stage]:
    """The stages of a new run."""
    if config.run.progressive:
        return _chain(
            0,
            [
                (s.num_epochs, s.image_size, s.batch_size)
                for s in parse_progressive(config.run.progressive, config.model)
            ],
        )
    return [Stage(0, config.run.num_epochs, config.data.image_size, config.run.batch_size)]


def _chain(first_epoch: int, parts: list[tuple[int, int, int]]) -> list[Stage]:
    stages = []
    for num_epochs, image_size, batch_size in parts:
        stages.append(Stage(first_epoch, num_epochs, image_size, batch_size))
        first_epoch += num_epochs
    return stages


def current_stage(stages: list[Stage], epoch: int) -> Stage | None:
    """The stage that `epoch` belongs to; None where all are finished."""
    return next((stage for stage in stages if stage.end_epoch > epoch), None)


def resumed_stages(
    stages: list[Stage], position: Position, config: Config, given: dict[str, Any]
) -> tuple[list[Stage], Position]:
    """Stages and position of a run that goes on from a checkpoint with the `given` flags.

    With the stage's own image size an unfinished stage is finished and a finished one followed by another of
    --num_epochs; with another image size a new stage begins. `--resume_from latest` begins none unless
    --new_stage says so: a run that is finished then has no current stage.
    """
    if given.get("progressive"):
        planned = first_stages(config)
        if config.run.early_stopping:
            planned = _stopped_early(planned, stages, position)
        return _same_beginning(planned, stages, position), position
    latest = given["resume_from"] == "latest"
    stage = current_stage(stages, position.epoch)
    size = given.get("image_size", (stage or stages[-1]).image_size)
    if stage is not None and size == stage.image_size:
        return _with_flags(stages, stage, position, given), position
    if latest and not config.run.new_stage:
        if stage is None and size == stages[-1].image_size:
            return stages, position
        raise UserError(
            f"--image_size {size} is not the {(stage or stages[-1]).image_size} of the run: "
            "--resume_from latest begins a new stage only with --new_stage"
        )
    return _new_stage(stages, stage, position, config, size)


def _new_stage(stages, stage, position, config, size):
    """Cut the running stage off where it is and append one of --num_epochs at `size`."""
    done = [s for s in stages if s.end_epoch <= position.epoch]
    if position.images_in_epoch:  # what is left of a begun epoch is left out
        position = replace(position, epoch=position.epoch + 1, images_in_epoch=0)
    if stage is not None and position.epoch > stage.first_epoch:
        done.append(replace(stage, num_epochs=position.epoch - stage.first_epoch))
    new = Stage(position.epoch, config.run.num_epochs, size, config.run.batch_size)
    return [*done, new], position


def _with_flags(stages, stage, position, given):
    """The unfinished stage with given --num_epochs and --batch_size; later stages move along."""
    num_epochs = given.get("num_epochs", stage.num_epochs)
    begun = position.epoch - stage.first_epoch + (position.images_in_epoch > 0)
    if num_epochs < begun:
        raise UserError(
            f"--num_epochs {num_epochs} is less than the {begun} epochs this stage has begun: raise it"
        )
    changed = replace(stage, num_epochs=num_epochs, batch_size=given.get("batch_size", stage.batch_size))
    index = stages.index(stage)
    later = _chain(
        changed.end_epoch, [(s.num_epochs, s.image_size, s.batch_size) for s in stages[index + 1 :]]
    )
    return [*stages[:index], changed, *later]


def _stopped_early(plan: list[Stage], stages: list[Stage], position: Position) -> list[Stage]:
    """The given plan, with finished stages as short as --early_stopping has left them."""
    lengths = [stage.num_epochs for stage in plan]
    for index, (planned, done) in enumerate(zip(plan, stages, strict=False)):
        if done.end_epoch <= position.epoch:
            lengths[index] = min(planned.num_epochs, done.num_epochs)
    parts = [(n, s.image_size, s.batch_size) for n, s in zip(lengths, plan, strict=True)]
    return _chain(0, parts)


def _same_beginning(plan: list[Stage], stages: list[Stage], position: Position) -> list[Stage]:
    """The given plan, where it agrees with every stage the run has begun."""
    begun = [s for s in stages if s.first_epoch < position.epoch + (position.images_in_epoch > 0)]
    for planned, done in zip(plan, begun, strict=False):
        if planned != done:
            raise UserError(
                f"--progressive says {_written(planned)} where the checkpoint has trained {_written(done)}: "
                "repeat the list the run began with"
            )
    if len(begun) > len(plan):
        raise UserError(
            "--progressive names fewer stages than the checkpoint has begun: repeat its whole list"
        )
    return plan


def _written(stage: Stage) -> str:
    return f"{stage.image_size}:{stage.num_epochs}:{stage.batch_size}"
