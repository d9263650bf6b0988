"""What happens between steps: records, sample grids, validations, checkpoints and the end of an epoch."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

from vae.data.dataset import Batch
from vae.device import is_out_of_memory
from vae.system import console
from vae.training.checkpoints.lineage import write_last_run
from vae.training.checkpoints.saving import NOT_FINITE, raise_if_diverged, save
from vae.training.checkpoints.store import position_name
from vae.training.context import RunContext, StageContext
from vae.training.memory.oom_retry import free_memory, release_graph
from vae.training.memory.stage_memory import memory_peaks
from vae.training.output.logbook import Logbook
from vae.training.output.run_folder import epoch_name, step_name
from vae.training.records.adversarial_ratio import adversarial_ratios
from vae.training.records.duration import duration_line
from vae.training.records.health import exposed_allreduce_seconds
from vae.training.records.running_metrics import RunningMetrics, loss_record
from vae.training.recovery.signals import LAST_VALIDATION, VALIDATION
from vae.training.stages import is_started, shorten_stage
from vae.training.state import TrainingState, is_finite
from vae.training.validation.measure import Metrics
from vae.training.validation.sample_grid import GRID_IMAGES, sample_grid
from vae.training.validation.stage import measure_baselines, validate, validate_smoke_set


def after_step(
    run: RunContext, ctx: StageContext, state: TrainingState, bar: tqdm, batch: Batch, stopping: bool
) -> None:
    """Log, sample, validate and save, each if it is due after this step with `batch`.

    If a signal asked to stop, only log: a validation could take minutes. The resumed run ends the epoch.
    """
    options, step = run.config.run, state.position.step
    epoch_is_done = ctx.steps.epoch_is_done(state.position)
    if step % options.log_freq == 0 or epoch_is_done:
        log_steps(run, ctx, state, bar, batch)
    if run.dist.is_main:
        ctx.writer.report()
    if stopping:
        return
    if options.save_samples_freq and step % options.save_samples_freq == 0:
        save_samples(run, state, ctx.logbook, ctx.stage.image_size, ctx)
    if run.validation_set is not None and options.smoke_steps and step % options.smoke_steps == 0:
        guard(run, ctx, state, epoch_is_done)
    if epoch_is_done:
        end_epoch(run, ctx, state)
    elif options.checkpoint_steps and step % options.checkpoint_steps == 0:
        save(run, ctx, state, step_name(step))


def log_steps(run: RunContext, ctx: StageContext, state: TrainingState, bar: tqdm, batch: Batch) -> None:
    """Write the record of the steps since the last one. No other part of a step synchronizes the device.

    `batch` is that of the last step. Raises NonFiniteError if training has diverged.
    """
    metrics, step = ctx.metrics, state.position.step
    means = metrics.all_reduced_means(run.dist)
    record = {
        "epoch": state.position.epoch + 1,  # the current epoch, counted from 1
        **loss_record(means, run.networks.terms),
        "learning_rate": state.optimizers[0].param_groups[0]["lr"],
        "gradient_norm": float(metrics.norms[0]),
        **metrics.speed(),
        "nonfinite_steps": int(state.update.nonfinite_total),
        **memory_peaks(run.dist.device),
    }
    if "adversarial" in means:
        record["disc_learning_rate"] = state.optimizers[1].param_groups[0]["lr"]
        record |= adversarial_ratios(run, ctx, state, batch)
    if run.fp16:
        record["loss_scale"] = float(state.update.loss_scale)
    ctx.logbook.record("train", step, record)
    record_health(run, ctx, state, record["data_wait_share"])
    shown = (
        f"{record['images_per_second']:.2f} images/s, loss {record['loss']:.4f}, PSNR {record['psnr']:.2f}"
    )
    bar.set_postfix_str(shown)
    if bar.disable:  # no terminal: a log file gets lines instead of a progress bar
        console.info(f"step {step}: {shown}")
    ctx.metrics = RunningMetrics(health=metrics.health.restarted())
    _check_stability(run, state, record["loss"], means["mse"])


def record_health(run: RunContext, ctx: StageContext, state: TrainingState, wait_share: float) -> None:
    """Write the records of the data and of the trainer: one exchange between the processes."""
    metrics, networks = ctx.metrics, run.networks
    allreduce = exposed_allreduce_seconds(networks.autoencoder, networks.discriminator)
    gathered = metrics.health.gathered(run.dist, metrics.seconds(), wait_share, allreduce)
    ctx.logbook.record("data", state.position.step, gathered.data())
    trainer = {"restarts": len(state.lineage.ancestors), "out_of_memory": ctx.settings.out_of_memory}
    ctx.logbook.record("trainer", state.position.step, {**trainer, **gathered.processes()})


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
    raise_if_diverged(run, reason)


def check_end(run: RunContext, state: TrainingState) -> None:
    """Raise NonFiniteError if a stage ends with outputs out of range: too late for a spike that lasts."""
    raise_if_diverged(run, state.stability.divergence(is_end=True))


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


def save_samples(
    run: RunContext,
    state: TrainingState,
    logbook: Logbook,
    image_size: int,
    ctx: StageContext | None = None,
) -> None:
    """Write a sample grid of --sample_images, or else of the first validation images.

    If memory runs out, there is none, unless the CUDA graph of `ctx` can be released.
    """
    if not run.dist.is_main:
        return
    try:
        for images in _sample_batches(run, image_size, ctx.check_waiting if ctx else lambda: None):
            grid = sample_grid(state.eval_model, run.networks, images)
            logbook.image("samples", state.position.step, grid)
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    if ctx is not None and release_graph(ctx.settings, run.networks):
        save_samples(run, state, logbook, image_size, ctx)
        return
    free_memory(run.networks)
    console.info(f"out of memory: no sample grid of step {state.position.step}; training is the same")


def _sample_batches(
    run: RunContext, image_size: int, while_waiting: Callable[[], None]
) -> Iterator[torch.Tensor]:
    """The images of a sample grid as one uint8 batch (N, 3, S, S); no batch if there are none."""
    if run.sample_images:
        yield run.sample_images[image_size].to(run.dist.device)
    elif run.validation_set is not None:
        shown = replace(run.validation_set, count=min(run.validation_set.count, GRID_IMAGES))
        alone = replace(run.dist, world_size=1)  # so that the images are not divided among processes
        yield from shown.batches(run.config.data, image_size, GRID_IMAGES, 0, alone, while_waiting)


def begin_stage(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Measure the baselines, and the weights that the stage begins with."""
    position, image_size = state.position, ctx.stage.image_size
    is_start = not is_started(ctx.stage, position)
    if is_start:
        state.history.begin_stage()
        state.stability.begin_stage()
    if run.validation_set is None:
        return
    with ctx.signals.answering(VALIDATION):
        ctx.baselines = measure_baselines(run, ctx, state.autoencoder.downsampling)
    for name, values in ctx.baselines.items():
        ctx.logbook.record("baseline", position.step, {"codec": name, "image_size": image_size, **values})
    if is_start:
        with ctx.signals.answering(VALIDATION):
            metrics = validate(run, ctx, state, "start", position.epoch)
            state.history.add_start(metrics, _start_checkpoint(run, state))
            if run.config.run.smoke_steps and ctx.steps.total >= run.config.run.smoke_steps:
                validate_smoke_set(run, ctx, state)


def _start_checkpoint(run: RunContext, state: TrainingState) -> str | None:
    """The checkpoint in the output folder with the current weights, before a stage's first step."""
    step, path = state.position.step, run.resumed_from
    if state.saved_step == step:  # the end of the stage before
        return position_name(state.position)
    if path is None or step != state.begun_at.step or path.parent.resolve() != run.output_dir.resolve():
        return None
    return path.name


def validate_final(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Validate the weights that will be exported, if --max_steps ended the run between two validations."""
    if run.validation_set is not None and state.validated_step != state.position.step:
        with ctx.signals.answering(LAST_VALIDATION):
            validate(run, ctx, state, f"step {state.position.step}", state.position.epoch)


def guard(run: RunContext, ctx: StageContext, state: TrainingState, epoch_is_done: bool) -> None:
    """Measure the smoke set; if its PSNR has fallen, validate all images now, unless that is due anyway."""
    with ctx.signals.answering(VALIDATION):
        has_fallen = validate_smoke_set(run, ctx, state)
        if has_fallen and not (epoch_is_done and _validation_is_due(run, ctx, state.position.epoch + 1)):
            validate(run, ctx, state, f"step {state.position.step}", state.position.epoch)


def _validation_is_due(run: RunContext, ctx: StageContext, epochs: int) -> bool:
    """Whether the end of this epoch, counted from 1, is validated."""
    is_due = epochs % run.config.run.val_freq == 0 or epochs == ctx.stage.end_epoch
    return run.validation_set is not None and is_due


def end_epoch(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Validate if it is due; move on to the next epoch; save if it is due; end the stage by --early_stopping.

    What is saved while a validation hangs belongs to the old epoch: the resumed run repeats the validation.
    """
    options, epochs, history = run.config.run, state.position.epoch + 1, state.history
    is_last = epochs == ctx.stage.end_epoch
    save_is_due = epochs % options.checkpoint_freq == 0 or is_last
    metrics: Metrics = {}
    if _validation_is_due(run, ctx, epochs):
        ends_run = epochs == state.stages[-1].end_epoch
        with ctx.signals.answering(LAST_VALIDATION if ends_run else VALIDATION):
            metrics = validate(run, ctx, state, f"epoch {epochs}", epochs)
        history.add_epoch(metrics)
    state.position.epoch, state.position.images_in_epoch = epochs, 0
    limit = options.early_stopping
    if metrics and limit and history.without_gain >= limit and not is_last:
        console.info(f"--early_stopping {limit}: PSNR has stopped rising, the stage ends")
        state.stages, ctx.stage = shorten_stage(state.stages, ctx.stage, epochs)
        save_is_due = True
    if save_is_due:
        best = history.best_checkpoint, history.best_checkpoint_psnr
        if metrics:
            history.add_checkpoint(epoch_name(epochs), metrics)
        ends_run = epochs == state.stages[-1].end_epoch
        if not save(run, ctx, state, epoch_name(epochs), required=ends_run):
            history.best_checkpoint, history.best_checkpoint_psnr = best
