"""The stages of a run and their steps: pure functions of `Stage` and `Position`, which checkpoints contain.

A stage is one resolution of a run: its first epoch, its length in epochs or optimizer steps, image size and
batch size. Epochs are numbered over all stages, from 0 in code and from 1 in file names and messages. A stage
that ends within an epoch skips the rest of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

from vae.config.options import Config
from vae.config.resolve import parse_progressive
from vae.sampling.order import steps_per_epoch
from vae.system.errors import UserError

VALIDATION_SHARE = 0.1  # of the time of training, at most
# Forward passes that a training image costs: three, with a backward pass, but two of a decoder alone; and a
# validation image also costs its metrics. Measured on a CPU with a small network: 1.8.
FORWARDS_PER_IMAGE = 2
VALIDATIONS = 10  # at least, of a stage in steps whose epochs are long


@dataclass
class Position:
    """The progress of a run. Images are counted as dataset indices over all processes, used or rejected."""

    epoch: int = 0
    images_in_epoch: int = 0
    step: int = 0  # optimizer steps of the autoencoder, over the whole run
    images: int = 0  # over the whole run
    disc_begun_at: int | None = None  # optimizer step of the run, if the discriminator has begun


@dataclass(frozen=True)
class Stage:
    """A number of epochs, or of optimizer steps, at one image size (px) and batch size (images per device).

    Where it begins is known when the stage before has ended.
    """

    first_epoch: int
    num_epochs: int | None  # None: of a stage in steps that has not ended
    image_size: int
    batch_size: int
    num_steps: int | None = None  # of a stage in steps
    first_step: int = 0  # optimizer steps of the run before it

    @property
    def length(self) -> dict[str, int | None]:
        """The options of its length."""
        return {
            "num_epochs": self.num_epochs if self.num_steps is None else None,
            "num_steps": self.num_steps,
        }

    @property
    def end_epoch(self) -> int:
        """Epochs of the run at its end, also those that were not finished; so far at least, if not known."""
        return self.first_epoch + (self.num_epochs or 0)

    def is_done(self, position: Position) -> bool:
        """Whether it has ended. One in steps ends within an epoch, after its last validation and save."""
        if self.num_steps is not None:
            return self.num_epochs is not None
        return position.epoch >= self.end_epoch


@dataclass(frozen=True)
class StageSteps:
    """The optimizer steps of a stage."""

    stage: Stage
    per_epoch: int  # optimizer steps
    local_images: int  # dataset indices per optimizer step of one process
    images: int  # dataset indices per optimizer step of all processes

    @classmethod
    def of(cls, stage: Stage, num_images: int, accumulation_steps: int, world_size: int) -> "StageSteps":
        """Return the steps of `stage` on a training set of `num_images`."""
        local = stage.batch_size * accumulation_steps
        return cls(stage, steps_per_epoch(num_images, local, world_size), local, local * world_size)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole stage."""
        if self.stage.num_steps is not None:
            return self.stage.num_steps
        assert self.stage.num_epochs is not None
        return self.stage.num_epochs * self.per_epoch

    def done(self, position: Position) -> int:
        """Return the optimizer steps of the stage that are done."""
        if not is_started(self.stage, position):
            return 0
        if self.stage.num_steps is not None:
            return position.step - self.stage.first_step
        epochs = position.epoch - self.stage.first_epoch
        return epochs * self.per_epoch + position.images_in_epoch // self.images

    def epoch_is_done(self, position: Position) -> bool:
        """Whether the position is at the end of an epoch."""
        return position.images_in_epoch >= self.per_epoch * self.images

    def epochs(self, position: Position) -> float:
        """Return the epochs of the run at the position, with a part of the current one."""
        if not position.images_in_epoch:
            return position.epoch
        return position.epoch + round(position.images_in_epoch / (self.per_epoch * self.images), 4)

    def are_done(self, position: Position) -> bool:
        """Whether the last step of the stage is done."""
        return self.done(position) >= self.total

    def validation_is_due(self, position: Position, val_freq: int | None, val_images: int) -> bool:
        """Whether a validation of `val_images` is due at the position; `val_freq`: epochs between them.

        Without `val_freq`, so many epochs are between them that they take about VALIDATION_SHARE of the time,
        and a stage in steps is also validated within long epochs. The time itself decides nothing, so a
        resumed run validates after the same steps.
        """
        done = self.done(position)
        if done >= self.total:
            return True
        least = math.ceil(val_images / (FORWARDS_PER_IMAGE * VALIDATION_SHARE * self.images))
        between = max(1, least, self.total // VALIDATIONS)
        if val_freq is None and self.stage.num_steps is not None and between < self.per_epoch:
            return done > 0 and done % between == 0
        epochs = val_freq or math.ceil(least / self.per_epoch) or 1
        return self.epoch_is_done(position) and (position.epoch + 1) % epochs == 0


def first_stages(config: Config) -> list[Stage]:
    """Return the stages of a new run."""
    run = config.run
    if run.progressive:
        planned = parse_progressive(run.progressive, config.model)
        return _consecutive(
            0, 0, [Stage(0, s.num_epochs, s.image_size, s.batch_size, s.num_steps) for s in planned]
        )
    return [Stage(0, run.num_epochs, config.data.image_size, run.batch_size, run.num_steps)]


def _consecutive(first_epoch: int, first_step: int, stages: Sequence[Stage]) -> list[Stage]:
    """Move the stages to this beginning; after one in steps, the beginning is not known yet."""
    moved = []
    for stage in stages:
        moved.append(replace(stage, first_epoch=first_epoch, first_step=first_step))
        first_epoch = moved[-1].end_epoch
    return moved


def stages_left(stages: list[Stage], position: Position) -> list[Stage]:
    """Return the stages that have not ended, from the current one on."""
    return list(dropwhile(lambda stage: stage.is_done(position), stages))


def current_stage(stages: list[Stage], position: Position) -> Stage | None:
    """Return the stage that trains at the position, or None after the last stage."""
    return next(iter(stages_left(stages, position)), None)


def end_stage(stages: list[Stage], stage: Stage, position: Position) -> tuple[list[Stage], Stage]:
    """End `stage` at the position; later stages begin there. Returns all stages and the ended one.

    A stage that ends within an epoch then is one in steps.
    """
    epochs = position.epoch + (position.images_in_epoch > 0)
    in_steps = stage.num_steps is not None or position.images_in_epoch > 0
    num_steps = position.step - stage.first_step if in_steps else None
    ended = replace(stage, num_epochs=epochs - stage.first_epoch, num_steps=num_steps)
    index = stages.index(stage)
    return [*stages[:index], ended, *_consecutive(epochs, position.step, stages[index + 1 :])], ended


def is_started(stage: Stage, position: Position) -> bool:
    """Whether a step of the stage has been made."""
    in_first = position.epoch == stage.first_epoch and position.images_in_epoch > 0
    return position.epoch > stage.first_epoch or in_first


def resumed_stages(
    stages: list[Stage], position: Position, config: Config, given: dict[str, Any]
) -> tuple[list[Stage], Position]:
    """Return the stages and the position of a run that resumes from a checkpoint with the `given` flags.

    With the stage's own image size, an unfinished stage is finished, and a finished one is followed by
    another of --num_epochs or --num_steps. With another image size, a new stage begins. `--resume_from
    latest` begins a new stage only with --new_stage: without it, a finished run has no current stage.
    """
    if given.get("progressive"):
        return _continued_plan(first_stages(config), stages, position, config), position
    latest = given["resume_from"] == "latest"
    stage = current_stage(stages, position)
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
    """End the current stage at the position and append one of the given length at `image_size`."""
    done = stages[: len(stages) - len(stages_left(stages, position))]
    if stage is not None and is_started(stage, position):
        done.append(end_stage(stages, stage, position)[1])
    if position.images_in_epoch:  # the rest of a started epoch is skipped
        position = replace(position, epoch=position.epoch + 1, images_in_epoch=0)
    run = config.run
    new = Stage(position.epoch, run.num_epochs, image_size, run.batch_size, run.num_steps, position.step)
    return [*done, new], position


def _with_given_flags(
    stages: list[Stage], stage: Stage, position: Position, given: dict[str, Any]
) -> list[Stage]:
    """Return the stages with the given length and --batch_size for the unfinished `stage`."""
    changed = replace(stage, batch_size=given.get("batch_size", stage.batch_size))
    num_steps, num_epochs = given.get("num_steps"), given.get("num_epochs")
    if num_steps is not None:
        done = position.step - stage.first_step
        if num_steps < done:
            raise UserError(f"--num_steps {num_steps} is below the {done} steps already made: raise it")
        changed = replace(changed, num_epochs=None, num_steps=num_steps)
    elif num_epochs is not None:
        started = position.epoch - stage.first_epoch + (position.images_in_epoch > 0)
        if num_epochs < started:
            raise UserError(
                f"--num_epochs {num_epochs} is below the {started} epochs already started: raise it"
            )
        changed = replace(changed, num_epochs=num_epochs, num_steps=None)
    index = stages.index(stage)
    return [*stages[:index], changed, *_consecutive(changed.end_epoch, 0, stages[index + 1 :])]


def _continued_plan(
    plan: list[Stage], stages: list[Stage], position: Position, config: Config
) -> list[Stage]:
    """Return the stages that the run has started, then the rest of the plan; UserError if they differ."""
    left = stages_left(stages, position)
    started = stages[: len(stages) - len(left)]
    if left and is_started(left[0], position):
        started.append(left[0])
    for planned, done in zip(plan, started, strict=False):
        is_short = config.run.early_stopping and done.is_done(position)
        same_size = (planned.image_size, planned.batch_size) == (done.image_size, done.batch_size)
        if not (same_size and (is_short or planned.length == done.length)):
            raise UserError(
                f"--progressive has {_as_flag(planned)}, but the checkpoint has trained {_as_flag(done)}: "
                "repeat the list that the run began with"
            )
    if len(started) > len(plan):
        raise UserError("--progressive has fewer stages than the checkpoint: repeat the whole list")
    rest = plan[len(started) :]
    if started and started[-1] in left:
        return [*started, *_consecutive(started[-1].end_epoch, 0, rest)]
    return [*started, *_consecutive(position.epoch + (position.images_in_epoch > 0), position.step, rest)]


def _as_flag(stage: Stage) -> str:
    length = stage.num_epochs if stage.num_steps is None else f"{stage.num_steps}steps"
    return f"{stage.image_size}:{length}:{stage.batch_size}"
