"""The stages of a run and their steps: pure functions of `Stage` and `Position`, which checkpoints contain.

A stage is one resolution of a run: its first epoch, number of epochs, image size and batch size. Epochs are
numbered over all stages, from 0 in code and from 1 in file names and messages.
"""

from dataclasses import dataclass, replace
from typing import Any

from vae.config.options import Config
from vae.config.resolve import parse_progressive
from vae.interop.checkpoint_file import Position, Stage
from vae.sampling.order import steps_per_epoch
from vae.system.errors import UserError


@dataclass(frozen=True)
class StageSteps:
    """How the epochs of a stage divide into optimizer steps."""

    first_epoch: int
    num_epochs: int
    per_epoch: int  # optimizer steps
    local_images: int  # dataset indices per optimizer step of one process
    images: int  # dataset indices per optimizer step of all processes

    @classmethod
    def of(cls, stage: Stage, num_images: int, accumulation_steps: int, world_size: int) -> "StageSteps":
        """The steps of `stage` on a training set of `num_images`."""
        local = stage.batch_size * accumulation_steps
        per_epoch = steps_per_epoch(num_images, local, world_size)
        return cls(stage.first_epoch, stage.num_epochs, per_epoch, local, local * world_size)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole stage."""
        return self.num_epochs * self.per_epoch

    def done(self, position: Position) -> int:
        """Optimizer steps of the stage that are done."""
        return (position.epoch - self.first_epoch) * self.per_epoch + position.images_in_epoch // self.images

    def epoch_is_done(self, position: Position) -> bool:
        """Whether the position is at the end of an epoch."""
        return position.images_in_epoch >= self.per_epoch * self.images


def first_stages(config: Config) -> list[Stage]:
    """The stages of a new run."""
    if config.run.progressive:
        planned = parse_progressive(config.run.progressive, config.model)
        return _consecutive(0, [(s.num_epochs, s.image_size, s.batch_size) for s in planned])
    return [Stage(0, config.run.num_epochs, config.data.image_size, config.run.batch_size)]


def _consecutive(first_epoch: int, parts: list[tuple[int, int, int]]) -> list[Stage]:
    """Stages in sequence, from (num_epochs, image_size, batch_size) of each."""
    stages = []
    for num_epochs, image_size, batch_size in parts:
        stages.append(Stage(first_epoch, num_epochs, image_size, batch_size))
        first_epoch += num_epochs
    return stages


def current_stage(stages: list[Stage], epoch: int) -> Stage | None:
    """The stage that contains `epoch`, or None after the last stage."""
    return next((stage for stage in stages if stage.end_epoch > epoch), None)


def shorten_stage(stages: list[Stage], stage: Stage, end_epoch: int) -> tuple[list[Stage], Stage]:
    """End `stage` at `end_epoch`; later stages start earlier. Returns all stages and the shortened one."""
    short = replace(stage, num_epochs=end_epoch - stage.first_epoch)
    return replace_stage(stages, stage, short), short


def replace_stage(stages: list[Stage], stage: Stage, changed: Stage) -> list[Stage]:
    """The stages with `changed` instead of `stage`; later stages start after it."""
    index = stages.index(stage)
    later = [(s.num_epochs, s.image_size, s.batch_size) for s in stages[index + 1 :]]
    return [*stages[:index], changed, *_consecutive(changed.end_epoch, later)]


def is_started(stage: Stage, position: Position) -> bool:
    """Whether a step of the stage has been made."""
    return position.epoch > stage.first_epoch or position.images_in_epoch > 0


def resumed_stages(
    stages: list[Stage], position: Position, config: Config, given: dict[str, Any]
) -> tuple[list[Stage], Position]:
    """Stages and position of a run that resumes from a checkpoint with the `given` flags.

    With the stage's own image size, an unfinished stage is finished, and a finished one is followed by
    another of --num_epochs. With another image size, a new stage begins. `--resume_from latest` begins a new
    stage only with --new_stage: without it, a finished run has no current stage.
    """
    if given.get("progressive"):
        return _continued_plan(first_stages(config), stages, position, config), position
    latest = given["resume_from"] == "latest"
    stage = current_stage(stages, position.epoch)
    size = given.get("image_size", (stage or stages[-1]).image_size)
    if stage is not None and size == stage.image_size:
        return _with_given_flags(stages, stage, position, given), position
    if latest and not config.run.new_stage:
        if stage is None and size == stages[-1].image_size:
            return stages, position
        raise UserError(
            f"--image_size {size} differs from the run's {(stage or stages[-1]).image_size}: "
            "--resume_from latest begins a new stage only with --new_stage"
        )
    return _new_stage(stages, stage, position, config, size)


def _new_stage(
    stages: list[Stage], stage: Stage | None, position: Position, config: Config, image_size: int
) -> tuple[list[Stage], Position]:
    """End the current stage at the position and append one of --num_epochs at `image_size`."""
    done = [s for s in stages if s.end_epoch <= position.epoch]
    if position.images_in_epoch:  # the rest of a started epoch is skipped
        position = replace(position, epoch=position.epoch + 1, images_in_epoch=0)
    if stage is not None and position.epoch > stage.first_epoch:
        done.append(replace(stage, num_epochs=position.epoch - stage.first_epoch))
    new = Stage(position.epoch, config.run.num_epochs, image_size, config.run.batch_size)
    return [*done, new], position


def _with_given_flags(
    stages: list[Stage], stage: Stage, position: Position, given: dict[str, Any]
) -> list[Stage]:
    """The stages with the given --num_epochs and --batch_size for the unfinished `stage`."""
    num_epochs = given.get("num_epochs", stage.num_epochs)
    started = position.epoch - stage.first_epoch + (position.images_in_epoch > 0)
    if num_epochs < started:
        raise UserError(f"--num_epochs {num_epochs} is below the {started} epochs already started: raise it")
    changed = replace(stage, num_epochs=num_epochs, batch_size=given.get("batch_size", stage.batch_size))
    return replace_stage(stages, stage, changed)


def _continued_plan(
    plan: list[Stage], stages: list[Stage], position: Position, config: Config
) -> list[Stage]:
    """The stages that the run has started, then the rest of the plan; UserError if both do not fit."""
    started = [s for s in stages if s.first_epoch < position.epoch + (position.images_in_epoch > 0)]
    for planned, done in zip(plan, started, strict=False):
        is_short = config.run.early_stopping and done.end_epoch <= position.epoch
        if replace(planned, first_epoch=done.first_epoch) != done and not (
            is_short and (planned.image_size, planned.batch_size) == (done.image_size, done.batch_size)
        ):
            raise UserError(
                f"--progressive has {_as_flag(planned)}, but the checkpoint has trained {_as_flag(done)}: "
                "repeat the list that the run began with"
            )
    if len(started) > len(plan):
        raise UserError("--progressive has fewer stages than the checkpoint: repeat the whole list")
    rest = [(s.num_epochs, s.image_size, s.batch_size) for s in plan[len(started) :]]
    return [*started, *_consecutive(started[-1].end_epoch if started else 0, rest)]


def _as_flag(stage: Stage) -> str:
    return f"{stage.image_size}:{stage.num_epochs}:{stage.batch_size}"
