"""Checkpoints of a run: when one is saved, what it contains, and what is pruned after it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from vae.config.options import flatten
from vae.interop.checkpoint_schema import ContentError, check_content
from vae.system import console
from vae.system.errors import NonFiniteError, UserError
from vae.training.checkpoints.store import position_name, prune, save_verified, stage_ends
from vae.training.context import RunContext, StageContext
from vae.training.stages import Position, Stage, current_stage
from vae.training.state import TrainingState, checkpoint_content, is_finite

NOT_FINITE = "the weights are not finite"


def raise_if_diverged(run: RunContext, reason: str | None) -> None:
    """Raise NonFiniteError on all processes, if one has a reason."""
    if run.dist.all_reduce_scalars(reason is not None)[0]:
        raise NonFiniteError(reason or "training has diverged on another process")


def save_now(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Save a checkpoint named after the current position, unless this command has already saved this step."""
    if state.saved_step != state.position.step:
        save(run, ctx, state, position_name(state.position), in_doubt=True)


def save_alone(run: RunContext, ctx: StageContext, state: TrainingState) -> str | None:
    """Save without the other processes, which may hang or have ended; returns the name of the checkpoint.

    For the main process, from any thread. Nothing is saved within a change of the weights. Nothing is pruned.
    """
    if not run.dist.is_main or state.is_changing:
        return None
    name = position_name(state.position)
    if state.saved_step == state.position.step:
        return name if ctx.writer.finish() is None else None
    content, failure = checkpoint_of(run, ctx.stage, state), None
    try:
        check_content(content)
    except ContentError as error:
        failure = str(error)
    failure = failure or save_verified(run.output_dir / name, content)
    if failure is not None:
        console.warning(f"{run.output_dir / name} is not saved: {failure}")
        return None
    state.saved_step = state.position.step
    return name


def save(
    run: RunContext,
    ctx: StageContext,
    state: TrainingState,
    name: str,
    *,
    in_doubt: bool = False,
    required: bool = False,
) -> bool:
    """Save a checkpoint, then prune; whether it is being saved. Training continues while the file is written.

    While training may be diverging, nothing is pruned, and a checkpoint is saved only with `in_doubt`. A
    `required` one is saved and waited for: UserError if it cannot be written. Raises NonFiniteError if the
    weights are not finite.
    """
    raise_if_diverged(run, None if is_finite(state) else NOT_FINITE)
    path, doubt = run.output_dir / name, _doubt(state)
    if doubt and not (in_doubt or required):
        console.info(f"{path} is not saved: {doubt}")
        return False
    if run.dist.is_main:
        is_written = partial(_after_write, run, state, replace(state.position), path, prunes=not doubt)
        ctx.writer.save(path, checkpoint_of(run, ctx.stage, state), is_written)
    state.saved_step = state.position.step
    if required:
        finish_saving(run, ctx)
    return True


def finish_saving(run: RunContext, ctx: StageContext) -> None:
    """Wait until the last checkpoint is on disk; UserError, on every process, if it cannot be written."""
    failure = ctx.writer.finish() if run.dist.is_main else None
    if run.dist.all_reduce_scalars(failure is not None)[0]:
        reason = failure or "the main process reports the reason"
        raise UserError(f"--output_dir {run.output_dir}: the last checkpoint could not be written: {reason}")


def _doubt(state: TrainingState) -> str | None:
    """Why training may be diverging, or None."""
    if streak := int(state.update.nonfinite_streak):
        return f"the last {streak} steps were not finite"
    if state.stability.spike_records:
        return f"the loss has just jumped: {state.stability.spike}"
    return None


def _after_write(run: RunContext, state: TrainingState, at: Position, path: Path, prunes: bool) -> None:
    """After the checkpoint of the position `at` is on disk: let the next records judge it, and prune.

    Neither the best checkpoint, the last one of a stage, nor the last good one is removed. This may run in
    the writer's thread, when training is further.
    """
    state.stability.written.append((at.step, path))
    if not prunes:
        return
    best = state.history.best_checkpoint
    prune(
        run.output_dir,
        run.config.run.keep_checkpoints,
        apart=stage_ends(state.stages, at) | ({best} if best else set()),
        needed=state.stability.needed(),
        step=at.step,
        line=state.lineage,
    )


def checkpoint_of(run: RunContext, stage: Stage, state: TrainingState) -> dict:
    """The content of a checkpoint in `stage`."""
    config = flatten(run.config) | {
        "image_size": stage.image_size,
        "batch_size": stage.batch_size,
        "num_epochs": stage.num_epochs,
    }
    next_stage = current_stage(state.stages, state.position.epoch) or stage
    topology = run.contract["topology"] | {"batch_size": next_stage.batch_size}
    contract = run.contract | {"topology": topology}
    content = checkpoint_content(state, config, run.training_set.fingerprint(), contract)
    return {**content, "begun_from": run.begun_from}
