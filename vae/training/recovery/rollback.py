"""A run that diverges goes back to its last good checkpoint with half the learning rate, or stops."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vae.interop.checkpoint_file import load_checkpoint
from vae.system import console
from vae.system.errors import NonFiniteError, UserError
from vae.training.checkpoints.lineage import saved_lineage, write_last_run
from vae.training.checkpoints.saving import checkpoint_of
from vae.training.checkpoints.store import is_on_line, list_checkpoints, position_name, saved_step
from vae.training.context import RunContext, StageContext
from vae.training.contract import ROLLBACK, Resume, run_record
from vae.training.output.logbook import Logbook
from vae.training.setup import initial_content
from vae.training.stages import current_stage
from vae.training.state import TrainingState, restore


def begin_run(
    run: RunContext, state: TrainingState, logbook: Logbook, good: Path | None, resume: Resume
) -> None:
    """Record the run as the last one in its folder: `latest` follows it, even before its first checkpoint."""
    lineage = state.lineage
    if run.dist.is_main:
        write_last_run(run.output_dir, lineage, good)
    parent = lineage.ancestors[-1][0] if lineage.ancestors else ""
    values = {"id": lineage.id, "parent": parent, **run_record(resume, run.contract)}
    logbook.record("run", state.position.step, values)


def roll_back(run: RunContext, ctx: StageContext, state: TrainingState, reason: str) -> None:
    """Restore the last good checkpoint, which `latest` then continues, and halve the learning rate.

    `ctx` is the stage that diverged. Raises NonFiniteError if it has used all of its --rollbacks.
    """
    diverged_at, allowed, first_epoch = state.position.step, run.config.optim.rollbacks, ctx.stage.first_epoch
    learning_rate, peak = state.optimizers[0].param_groups[0]["lr"], ctx.peak
    ctx.writer.finish(try_again=False)  # before files are read
    source, content = _last_good(run, state, reason)
    state.is_changing = True
    _restore(run, state, content, is_start=source is None)
    state.is_changing = False
    caps, step = state.rollbacks.setdefault(first_epoch, []), state.position.step
    good, is_allowed = run.output_dir / position_name(state.position), len(caps) < allowed
    if is_allowed:
        caps.append(0.5 * learning_rate / peak if peak else 0.5)
    if is_allowed or source != good:
        _save(run, ctx, state, good)
    state.stability.begin(step, None)
    state.stability.good = good
    ctx.logbook.go_back(step)
    begin_run(run, state, ctx.logbook, good, Resume(ROLLBACK, reason))
    values: dict[str, float | int | str | None] = {"diverged_at": diverged_at, "reason": reason}
    ctx.logbook.record("rollback", step, {**values, "checkpoint": good.name, "learning_rate": learning_rate})
    found = f"step {diverged_at}, learning rate {learning_rate:g}: {reason}"
    if not is_allowed:
        raise NonFiniteError(
            f"{found}; this stage has used its --rollbacks {allowed}: lower --learning_rate (now {peak:g}) "
            f"or use --use_bf16, and resume from {good.name}, the last good checkpoint, with: "
            f"{run.resume_command}"
        )
    console.warning(
        f"{found}; training goes back to step {step} ({good.name}) with half the learning rate (rollback "
        f"{len(caps)} of {allowed} in this stage)"
    )


def _last_good(run: RunContext, state: TrainingState, reason: str) -> tuple[Path | None, dict[str, Any]]:
    """The last good checkpoint, found by the main process, and its content; without one, the run's start."""
    found = next(_valid_checkpoints(run, state), None) if run.dist.is_main else None
    names = run.dist.all_gather_set({str(found[0])} if found else set())
    if names:
        path = Path(names.pop())
        return found or (path, load_checkpoint(path))
    if run.resumed_from is not None:
        raise NonFiniteError(f"{reason}; no checkpoint in {run.output_dir} can be read to go back to")
    return None, initial_content(run)


def _valid_checkpoints(run: RunContext, state: TrainingState) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Checkpoints with their content: the good one, then older ones; without one, what the run continued."""
    good = state.stability.good
    limit = saved_step(good) if good else state.begun_at.step
    older = [
        path
        for path in list_checkpoints(run.output_dir)
        if 0 <= saved_step(path) <= limit and is_on_line(path, state.lineage)
    ]
    for path in dict.fromkeys(filter(None, [good, *older, run.resumed_from])):
        try:
            content = load_checkpoint(path)
        except UserError as error:
            console.info(f"skipped: {error}")
        else:
            yield path, content


def _restore(run: RunContext, state: TrainingState, content: dict[str, Any], is_start: bool) -> None:
    """Load the content of a checkpoint, but keep the number of rollbacks; a new run begins after it."""
    rollbacks = state.rollbacks
    if state.discriminator is not None and content["discriminator"] is None:
        restore(state, initial_content(run))
    restore(state, content)
    lineage = state.lineage if is_start else saved_lineage(content)
    if state.position.step == state.begun_at.step:  # a new stage may begin here
        state.position = replace(state.begun_at)
    state.lineage = lineage.continued(state.position.step)
    state.rollbacks = rollbacks
    state.saved_step = state.validated_step = -1
    state.last_validation = {}


def _save(run: RunContext, ctx: StageContext, state: TrainingState, path: Path) -> None:
    """Save the restored state, so that a resumed run knows of the rollback; a failure is only reported."""
    stage = current_stage(state.stages, state.position.epoch)
    assert stage is not None  # a step followed the checkpoint
    run.dist.barrier()  # the other processes may still be reading the file
    if run.dist.is_main:
        ctx.writer.save(path, checkpoint_of(run, stage, state), lambda: None)
        ctx.writer.finish()
