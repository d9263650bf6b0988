"""Saving the run: when a position is saved, under which name, and what happens when it cannot be."""

from pathlib import Path

from vae.config.errors import UserError
from vae.config.options import flatten
from vae.interop.checkpoint_file import save_checkpoint, verify_checkpoint
from vae.training.checkpoints import epoch_name, prune, step_name
from vae.training.logbook import say
from vae.training.setup import Run
from vae.training.stages import Stage
from vae.training.state import checkpoint_content


def save_here(run: Run, stage: Stage) -> None:
    """Save under the name of the current position, unless this very step is saved already."""
    position = run.state.position
    if run.saved_step != position.step:
        between = position.images_in_epoch > 0
        save(run, stage, step_name(position.step) if between else epoch_name(position.epoch), required=True)


def save(run: Run, stage: Stage, name: str, required: bool = False) -> None:
    """Write, verify and only then prune. A failure is said and training goes on, unless `required`."""
    path, failure = run.output_dir / name, None
    if run.processes.is_main:
        failure = _write(run, stage, path)
        if failure is None:
            best = run.state.history.best_checkpoint
            prune(run.output_dir, run.config.run.keep_checkpoints, run.stages, run.state.position, best)
        else:
            say(f"WARNING: {path} is not saved: {failure}; older checkpoints are untouched")
    (failures,) = run.processes.sum_numbers(failure is not None)
    if failures and required:
        reason = failure or "the first process says why"
        raise UserError(f"--output_dir {run.output_dir}: the last checkpoint could not be written: {reason}")
    if not failures:
        run.saved_step = run.state.position.step


def _write(run: Run, stage: Stage, path: Path) -> str | None:
    config = flatten(run.config) | {
        "image_size": stage.image_size,
        "batch_size": stage.batch_size,
        "num_epochs": stage.num_epochs,
    }
    try:
        save_checkpoint(path, checkpoint_content(run.state, config, run.stages, run.fingerprint))
        verify_checkpoint(path)
    except (OSError, UserError) as error:
        return str(error)
    return None
