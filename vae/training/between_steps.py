"""What happens between steps: records, sample grids, validations, checkpoints and the end of an epoch."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from vae import console
from vae.config.errors import NonFiniteError, UserError
from vae.config.options import flatten
from vae.training.checkpoints import position_name, prune, stage_ends
from vae.training.context import RunContext, StageContext
from vae.training.duration import duration_line
from vae.training.lineage import write_last_run
from vae.training.logbook import Logbook
from vae.training.run_folder import epoch_name, step_name
from vae.training.sample_grid import GRID_IMAGES, sample_grid
from vae.training.signals import LAST_VALIDATION, VALIDATION
from vae.training.stage_memory import memory_peaks
from vae.training.stages import Position, Stage, is_started, shorten_stage
from vae.training.state import TrainingState, checkpoint_content, is_finite
from vae.training.step_log import RunningMetrics, loss_record
from vae.training.validation import Metrics, baseline_metrics, validation_line, validation_metrics

NOT_FINITE = "the weights are not finite"


def after_step(run: RunContext, ctx: StageContext, state: TrainingState, bar: tqdm, stopping: bool) -> None:
    """Log, sample, validate and save, each if it is due after this step.

    If a signal asked to stop, only log: a validation could take minutes. The resumed run ends the epoch.
    """
    options, step = run.config.run, state.position.step
    epoch_is_done = ctx.steps.epoch_is_done(state.position)
    if step % options.log_freq == 0 or epoch_is_done:
        log_steps(run, ctx, state, bar)
    if run.dist.is_main:
        ctx.writer.report()
    if stopping:
        return
    if options.save_samples_freq and step % options.save_samples_freq == 0:
        save_samples(run, state, ctx.logbook, ctx.stage.image_size)
    if epoch_is_done:
        end_epoch(run, ctx, state)
    elif options.checkpoint_steps and step % options.checkpoint_steps == 0:
        save(run, ctx, state, step_name(step))


def log_steps(run: RunContext, ctx: StageContext, state: TrainingState, bar: tqdm) -> None:
    """Write the record of the steps since the last one. No other part of a step synchronizes the device.

    Raises NonFiniteError if training has diverged.
    """
    metrics, step = ctx.metrics, state.position.step
    means = metrics.all_reduced_means(run.dist)
    record = {
        "epoch": state.position.epoch + 1,  # the current epoch, counted from 1
        **loss_record(means, run.config.loss),
        "learning_rate": state.optimizers[0].param_groups[0]["lr"],
        "gradient_norm": float(metrics.norms[0]),
        **metrics.speed(),
        "nonfinite_steps": int(state.update.nonfinite_total),
        **memory_peaks(run.dist.device),
    }
    if run.fp16:
        record["loss_scale"] = float(state.update.loss_scale)
    ctx.logbook.record("train", step, record)
    shown = (
        f"{record['images_per_second']:.2f} images/s, loss {record['loss']:.4f}, PSNR {record['psnr']:.2f}"
    )
    bar.set_postfix_str(shown)
    if bar.disable:  # no terminal: a log file gets lines instead of a progress bar
        console.info(f"step {step}: {shown}")
    ctx.metrics = RunningMetrics()
    _check_stability(run, state, record["loss"], means["mse"])


def _check_stability(run: RunContext, state: TrainingState, loss: float, mse: float) -> None:
    """Judge a record: raise NonFiniteError if training has diverged, and note which checkpoint is good."""
    streak, limit = int(state.update.nonfinite_streak), run.config.optim.max_nonfinite_steps
    is_good = state.stability.add_record(state.position.step, math.nan if streak else loss, mse)
    reason = state.stability.divergence()
    if streak >= limit:
        reason = f"{streak} steps in a row had a non-finite gradient (--max_nonfinite_steps {limit})"
    elif streak and not is_finite(state):
        reason = NOT_FINITE
    if is_good and run.dist.is_main:
        write_last_run(run.output_dir, state.lineage, state.stability.good)
    _raise_if_diverged(run, reason)


def check_end(run: RunContext, state: TrainingState) -> None:
    """Raise NonFiniteError if a stage ends with outputs out of range: too late for a spike that lasts."""
    _raise_if_diverged(run, state.stability.divergence(is_end=True))


def _raise_if_diverged(run: RunContext, reason: str | None) -> None:
    """Raise NonFiniteError on all processes, if one has a reason."""
    if run.dist.all_reduce_scalars(reason is not None)[0]:
        raise NonFiniteError(reason or "training has diverged on another process")


def report_duration(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Print when the stage will end: after its first steps, and if that has changed by a third."""
    step, options, duration = state.position.step, run.config.run, ctx.duration
    if not duration.needs_mark(time.monotonic()) and step % options.log_freq:
        return
    run.dist.synchronize()  # twice in a stage; a record has already synchronized the device
    left = ctx.steps.total - ctx.steps.done(state.position)
    if options.max_steps is not None:
        left = min(left, options.max_steps - step)
    seconds = duration.add(step, time.monotonic(), left)
    if seconds is not None:
        console.info(duration_line(seconds, time.time()))


def save_samples(run: RunContext, state: TrainingState, logbook: Logbook, image_size: int) -> None:
    """Write a sample grid of --sample_images, or else of the first validation images."""
    if not run.dist.is_main:
        return
    for images in _sample_batches(run, image_size):
        grid = sample_grid(state.eval_model, run.networks, images)
        logbook.image("samples", state.position.step, grid)


def _sample_batches(run: RunContext, image_size: int) -> Iterator[torch.Tensor]:
    """The images of a sample grid as one uint8 batch (N, 3, S, S); no batch if there are none."""
    if run.sample_images:
        yield run.sample_images[image_size].to(run.dist.device)
    elif run.validation_set is not None:
        shown = replace(run.validation_set, names=run.validation_set.names[:GRID_IMAGES])
        alone = replace(run.dist, world_size=1)  # so that the images are not divided among processes
        yield from shown.batches(run.config.data, image_size, GRID_IMAGES, 0, alone)


def begin_stage(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Measure the baselines, and the weights that the stage begins with."""
    position, image_size = state.position, ctx.stage.image_size
    is_start = not is_started(ctx.stage, position)
    if is_start:
        state.history.begin_stage()
        state.stability.begin_stage()
    if run.validation_set is None:
        return
    batches, factor = _validation_batches(run, ctx), state.autoencoder.downsampling
    with ctx.signals.answering(VALIDATION):
        ctx.baselines = baseline_metrics(run.networks, batches, factor, run.dist)
    for name, values in ctx.baselines.items():
        ctx.logbook.record("baseline", position.step, {"codec": name, "image_size": image_size, **values})
    if is_start:
        with ctx.signals.answering(VALIDATION):
            state.history.start_psnr = _validate(run, ctx, state, "start").get("psnr")


def _validation_batches(run: RunContext, ctx: StageContext) -> Iterator[torch.Tensor]:
    assert run.validation_set is not None
    size, batch_size = ctx.stage.image_size, ctx.settings.micro_batch
    return run.validation_set.batches(run.config.data, size, batch_size, run.num_workers, run.dist)


def _validate(run: RunContext, ctx: StageContext, state: TrainingState, when: str) -> Metrics:
    """Validate the weights, write a record and print a line; warn if training has made them worse."""
    position, loss = state.position, run.config.loss
    measured = validation_metrics(state.eval_model, run.networks, _validation_batches(run, ctx), run.dist)
    metrics = {"epoch": position.epoch, "image_size": ctx.stage.image_size, **measured}
    state.last_validation, state.validated_step = metrics, position.step
    ctx.logbook.record("validation", position.step, metrics)
    ctx.logbook.draw_results()
    baseline = ctx.baselines.get("bicubic", {})
    console.info(validation_line(when, metrics, baseline, state.autoencoder.downsampling))
    adversarial = loss.adversarial_weight > 0 and position.step > loss.disc_start
    if "psnr" in metrics and not adversarial:  # the adversarial term may lower PSNR
        warning = state.history.decrease_warning(metrics["psnr"], run.config.optim)
        if warning:
            console.warning(warning)
    return metrics


def validate_final(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Validate the weights that will be exported, if --max_steps ended the run between two validations."""
    if run.validation_set is not None and state.validated_step != state.position.step:
        with ctx.signals.answering(LAST_VALIDATION):
            _validate(run, ctx, state, f"step {state.position.step}")


def end_epoch(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Move on to the next epoch; validate and save if they are due; end the stage by --early_stopping."""
    state.position.epoch, state.position.images_in_epoch = state.position.epoch + 1, 0
    options, epochs, history = run.config.run, state.position.epoch, state.history
    is_last = epochs == ctx.stage.end_epoch
    save_is_due = epochs % options.checkpoint_freq == 0 or is_last
    metrics: Metrics = {}
    if run.validation_set is not None and (epochs % options.val_freq == 0 or is_last):
        ends_run = epochs == state.stages[-1].end_epoch
        with ctx.signals.answering(LAST_VALIDATION if ends_run else VALIDATION):
            metrics = _validate(run, ctx, state, f"epoch {epochs}")
        history.add_epoch(metrics)
        if options.early_stopping and history.without_gain >= options.early_stopping and not is_last:
            console.info(
                f"--early_stopping {options.early_stopping}: PSNR has stopped rising, the stage ends"
            )
            state.stages, ctx.stage = shorten_stage(state.stages, ctx.stage, epochs)
            save_is_due = True
    if save_is_due:
        best = history.best_checkpoint, history.best_checkpoint_psnr
        if metrics:
            history.add_checkpoint(epoch_name(epochs), metrics)
        ends_run = epochs == state.stages[-1].end_epoch
        if not save(run, ctx, state, epoch_name(epochs), required=ends_run):
            history.best_checkpoint, history.best_checkpoint_psnr = best


def save_now(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Save a checkpoint named after the current position, unless this command has already saved this step."""
    if state.saved_step != state.position.step:
        save(run, ctx, state, position_name(state.position), in_doubt=True)


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
    _raise_if_diverged(run, None if is_finite(state) else NOT_FINITE)
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
    return checkpoint_content(state, config, run.training_set.fingerprint())
