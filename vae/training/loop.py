"""The training loop of a stage: each batch becomes one optimizer step."""

import time
from collections.abc import Iterator
from enum import Enum

import torch
from tqdm import tqdm

from vae.data.dataset import Batch
from vae.data.loading import TrainLoader
from vae.data.probing import accepted_bad_images
from vae.losses.adversarial import update_running
from vae.step import StepInputs, apply_update
from vae.system.errors import DataError, HangError, UserError
from vae.training.between_steps import after_step, check_end, end_epoch, report_duration
from vae.training.checkpoints.saving import finish_saving, save_now
from vae.training.context import RunContext, StageContext
from vae.training.memory.oom_retry import gradients_with_oom_retry
from vae.training.output.logbook import REJECTED_NAME
from vae.training.records.profiling import StepProfiler
from vae.training.records.running_metrics import RunningMetrics
from vae.training.recovery.signals import STEP, LoadingStoppedError
from vae.training.schedule import (
    discriminator_steps,
    ema_decay,
    halved,
    learning_rate_factor,
    lowered,
    warmup_steps,
)
from vae.training.state import TrainingState
from vae.training.step_inputs import step_inputs


class Outcome(Enum):
    """Why the loop of a stage ended."""

    FINISHED = "all epochs of the stage are done"
    MAX_STEPS = "--max_steps is reached"
    SIGNALLED = "a signal asked to stop"


def train_stage(run: RunContext, ctx: StageContext, state: TrainingState) -> Outcome:
    """Train the rest of a stage."""
    position, outcome = state.position, None
    ctx.metrics, ctx.signals.answer = RunningMetrics(), STEP
    folder = run.output_dir / "profile" / f"{ctx.stage.image_size}px"
    profiler = StepProfiler(run.config.speed.profile_steps if run.dist.is_main else 0, folder)
    with train_loader(run, ctx) as loader, _progress_bar(run, ctx, state) as bar:
        while outcome is None and position.epoch < ctx.stage.end_epoch:
            first_step = position.images_in_epoch // ctx.steps.images
            # after_step ends an epoch, unless the run was resumed after its last step or with larger steps
            if first_step >= ctx.steps.per_epoch:
                end_epoch(run, ctx, state)
                continue
            for batch in _timed(loader.batches(position.epoch, first_step), ctx):
                step = position.step
                outcome = take_step(run, ctx, state, batch)
                ctx.watchdog.beat()
                if position.step > step:
                    assert isinstance(batch, Batch)
                    bar.update()
                    profiler.step()
                    after_step(run, ctx, state, bar, batch, stopping=outcome is Outcome.SIGNALLED)
                if outcome is not None:
                    save_now(run, ctx, state)
                    finish_saving(run, ctx)
                    break
                report_duration(run, ctx, state)
                ctx.metrics.exclude_pause()
    profiler.close()
    if outcome is not Outcome.SIGNALLED:
        check_end(run, state)
    return outcome or Outcome.FINISHED


def take_step(
    run: RunContext, ctx: StageContext, state: TrainingState, batch: Batch | Exception
) -> Outcome | None:
    """Make one optimizer step from a batch; returns why training must stop after it, or None.

    An exception is the reason why this process has no batch: all processes save, without a step, and stop.
    """
    position, waited = state.position, run.dist.waits.seconds
    total_images, stop, save_asked, no_batch = _sync_ranks(run, ctx, state, batch)
    if no_batch or isinstance(batch, Exception):
        return _stop_without_batch(run, ctx, state, batch)
    sums, norms = update_weights(run, ctx, state, batch, total_images)
    position.step += 1
    position.images_in_epoch += ctx.steps.images
    position.images += ctx.steps.images
    state.is_changing = False
    ctx.metrics.add(sums, total_images, norms)
    ctx.metrics.health.add(batch, run.dist.waits.seconds - waited)
    if save_asked:
        save_now(run, ctx, state)
    if stop or (ctx.signals.stop and run.dist.world_size == 1):
        return Outcome.SIGNALLED
    limit = run.config.run.max_steps
    return Outcome.MAX_STEPS if limit is not None and position.step >= limit else None


def update_weights(
    run: RunContext,
    ctx: StageContext,
    state: TrainingState,
    batch: Batch,
    total_images: int,
    learning_rate: float | None = None,
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Update all weights from a batch; returns sums over its images, and the gradient norms.

    `total_images` counts the images of all processes in this step. `learning_rate` replaces the schedule's,
    for the autoencoder. The position does not change, so the state is then `is_changing`.
    """
    position, update = state.position, state.update
    inputs = step_inputs(run, ctx, state, batch, total_images)
    sums = _sums(run, ctx, batch, inputs)
    state.is_changing = True
    _set_learning_rates(run, ctx, state)
    if learning_rate is not None:
        _set_learning_rate(state.optimizers[0], learning_rate)
    optimizers = state.optimizers if inputs.adversarial_factor is not None else state.optimizers[:1]
    norms = apply_update(optimizers, update, run.config.optim, run.fp16, total_images == 0)
    if inputs.adversarial_factor is not None:
        measured = torch.stack([sums.pop("reconstruction_sq_norm"), sums.pop("adversarial_sq_norm")])
        state.running_sq_norms = update_running(state.running_sq_norms, run.dist.all_reduce(measured))
        sums["adversarial_factor"] = inputs.adversarial_factor * len(batch.images)
    if total_images:
        state.update_ema(ema_decay(run.config.optim.ema_decay, position.step, run.begun_from))
    return sums, norms


def measure_losses(
    run: RunContext, ctx: StageContext, state: TrainingState, batch: Batch, total_images: int
) -> dict[str, torch.Tensor]:
    """Sums of the losses over the images of a batch, without adversarial ones; nothing changes."""
    return _sums(run, ctx, batch, step_inputs(run, ctx, state, batch, total_images), backward=False)


def _sums(
    run: RunContext,
    ctx: StageContext,
    batch: Batch,
    inputs: StepInputs,
    backward: bool = True,
) -> dict[str, torch.Tensor]:
    sums = gradients_with_oom_retry(
        run.networks, inputs, ctx.settings, run.dist, run.resume_command, backward
    )
    if len(batch.images) == 0:  # the placeholder image of a process without images is not measured
        sums = {name: torch.zeros_like(value) for name, value in sums.items()}
    return sums


def _sync_ranks(
    run: RunContext, ctx: StageContext, state: TrainingState, batch: Batch | Exception
) -> tuple[int, bool, bool, bool]:
    """Number of images of all processes in this step, whether any process got a stop or a save signal, and
    whether one has no batch.

    Raises DataError, after saving a checkpoint, if too many images turned out unusable.
    """
    size, new = 0, set()
    if isinstance(batch, Batch):
        size = len(batch.images)
        new = {(r.name, str(r)) for r in batch.rejected if r.name not in state.rejected}
    asked, ctx.signals.save = ctx.signals.save, False
    images, rejected, stop, save_asked, no_batch = run.dist.all_reduce_scalars(
        size, len(new), ctx.signals.stop, asked, not isinstance(batch, Batch)
    )
    if rejected:
        _report_rejected(run, ctx, state, run.dist.all_gather_set(new))
    return int(images), stop > 0, save_asked > 0, no_batch > 0


def _stop_without_batch(
    run: RunContext, ctx: StageContext, state: TrainingState, batch: Batch | Exception
) -> Outcome:
    """Save and stop if a process has no batch: after a signal with an Outcome, or else with an error."""
    failed = isinstance(batch, Exception) and not isinstance(batch, LoadingStoppedError)
    if not run.dist.all_reduce_scalars(failed)[0]:
        return Outcome.SIGNALLED
    save_now(run, ctx, state)
    finish_saving(run, ctx)
    reason = batch if failed else DataError("another process has no images: it reports the reason")
    assert isinstance(reason, UserError)
    raise type(reason)(f"{reason}; saved at step {state.position.step}, resume with: {run.resume_command}")


def _report_rejected(
    run: RunContext, ctx: StageContext, state: TrainingState, new: set[tuple[str, str]]
) -> None:
    """Report each unusable image file once; stop the run if they are too many."""
    for name, line in sorted(new):
        state.rejected.add(name)
        ctx.logbook.rejected(line)
    share, total = run.config.data.max_bad_fraction, run.training_set.num_images
    accepted = accepted_bad_images(share, total)
    if len(state.rejected) > accepted:
        save_now(run, ctx, state)
        finish_saving(run, ctx)
        raise DataError(
            f"{len(state.rejected)} of {total} training images cannot be used, more than the {accepted} of "
            f"--max_bad_fraction {share}: they are listed in {run.output_dir / REJECTED_NAME}; "
            "remove them, or raise --max_bad_fraction"
        )


def _set_learning_rates(run: RunContext, ctx: StageContext, state: TrainingState) -> None:
    """Set the learning rates of this step, from the position within the stage."""
    loss, steps, done = run.config.loss, ctx.steps, ctx.steps.done(state.position)
    caps = state.rollbacks.get(ctx.stage.first_epoch, ())
    factor = lowered(_schedule_factor(run, ctx, done, steps.total), caps)
    _set_learning_rate(state.optimizers[0], ctx.peak * factor)
    if state.discriminator is not None:
        own = discriminator_steps(loss.disc_start, state.position.step, done, steps.total)
        factor = halved(_schedule_factor(run, ctx, *own), len(caps))
        _set_learning_rate(state.optimizers[1], loss.disc_learning_rate * factor)


def _schedule_factor(run: RunContext, ctx: StageContext, done: int, total: int) -> float:
    """The share of the peak learning rate after `done` of `total` steps, warm-up included."""
    optim = run.config.optim
    warm_up = warmup_steps(optim.warmup_epochs, ctx.steps.per_epoch, total)
    return learning_rate_factor(optim.lr_schedule, done, total, warm_up)


def _set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def train_loader(run: RunContext, ctx: StageContext) -> TrainLoader:
    """The training batches of a stage."""
    data = run.config.data
    return TrainLoader(
        run.training_set.crops(run.config, ctx.stage.image_size, ctx.steps.images),
        local_batch=ctx.steps.local_images,
        order=run.training_set.order_of(run.config, ctx.stage.image_size, ctx.steps.images),
        rank=run.dist.rank,
        world_size=run.dist.world_size,
        num_workers=run.num_workers,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=data.persistent_workers,
        pin_memory=run.dist.device.type == "cuda",
        while_waiting=ctx.check_waiting,
    )


def _timed(batches: Iterator[Batch], ctx: StageContext) -> Iterator[Batch | Exception]:
    """The batches; the time spent waiting for each is added to the running metrics.

    If one cannot be loaded, the reason comes last: the other processes must be told.
    """
    while True:
        started = time.perf_counter()
        try:
            batch = next(batches, None)
        except (DataError, HangError, LoadingStoppedError) as error:
            yield error
            return
        if batch is None:
            return
        ctx.metrics.wait_seconds += time.perf_counter() - started
        yield batch


def _progress_bar(run: RunContext, ctx: StageContext, state: TrainingState) -> tqdm:
    return tqdm(
        total=ctx.steps.total,
        initial=ctx.steps.done(state.position),
        desc=f"{ctx.stage.image_size} px",
        unit="step",
        dynamic_ncols=True,
        disable=None if run.dist.is_main else True,  # None: shown on a terminal, never written to a file
    )
