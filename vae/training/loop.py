"""The loop of a stage: a batch becomes a step, and between steps come records, validations, checkpoints."""

import time
from collections.abc import Iterator
from enum import Enum

import torch
from tqdm import tqdm

from vae.config.errors import DataError
from vae.data.dataset import Batch
from vae.data.loading import TrainLoader
from vae.losses.adversarial import adaptive_weight, ramp, update_running
from vae.noise import posterior_noise
from vae.step import StepInputs, apply_update
from vae.training.checkpoints import step_name
from vae.training.logbook import REJECTED_NAME, Logbook
from vae.training.milestones import Window, finish_epoch, log, save_samples
from vae.training.oom_retry import gradients_within_memory
from vae.training.profiling import StepProfiler
from vae.training.saving import save, save_here
from vae.training.schedule import ema_decay, learning_rate_factor, warmup_steps
from vae.training.setup import Run
from vae.training.signals import StopSignals
from vae.training.stages import Stage


class Outcome(Enum):
    """Why a stage's loop came back."""

    FINISHED = "the stage's epochs are done"
    ENOUGH_STEPS = "--max_steps is reached"
    SIGNALLED = "a signal asked to stop"


def train_stage(run: Run, stage: Stage, logbook: Logbook, signals: StopSignals) -> Outcome:
    """Train what is left of one stage."""
    position, window = run.state.position, Window()
    profiler = StepProfiler(
        run.config.speed.profile_steps, run.output_dir / "profile" / f"{stage.image_size}px", run.processes
    )
    outcome = None
    with _open_loader(run, stage) as loader, _progress_bar(run, stage) as bar:
        while outcome is None and position.epoch < stage.end_epoch:
            first_step = position.images_in_epoch // run.images_per_step(stage)
            if first_step >= run.steps_per_epoch(stage):  # resumed after its last step, or in larger steps
                stage = _end_epoch(run, stage, logbook)
                continue
            for batch in _timed(loader.batches(position.epoch, first_step), window):
                outcome = take_step(run, stage, batch, window, logbook, signals)
                bar.update()
                profiler.step()
                stage = _between_steps(run, stage, window, logbook, bar, outcome is Outcome.SIGNALLED)
                if outcome is not None:
                    save_here(run, stage)
                    break
                window.forget_pause()
    profiler.close()
    return outcome or Outcome.FINISHED


def _between_steps(run: Run, stage: Stage, window: Window, logbook: Logbook, bar: tqdm, hurry: bool) -> Stage:
    """Records, samples, validation and checkpoints, each where it is due after this step.

    In a `hurry` only the record: whoever asked to stop may not wait for a validation, and the next run
    begins with what is due at the end of an epoch.
    """
    options, position = run.config.run, run.state.position
    epoch_done = position.images_in_epoch >= run.steps_per_epoch(stage) * run.images_per_step(stage)
    if position.step % options.log_freq == 0 or epoch_done:
        log(run, window, logbook, bar)
    if hurry:
        return stage
    if options.save_samples_freq and position.step % options.save_samples_freq == 0:
        save_samples(run, stage, logbook)
    if epoch_done:
        return _end_epoch(run, stage, logbook)
    if options.checkpoint_steps and position.step % options.checkpoint_steps == 0:
        save(run, stage, step_name(position.step))
    return stage


def _end_epoch(run: Run, stage: Stage, logbook: Logbook) -> Stage:
    position = run.state.position
    position.epoch, position.images_in_epoch = position.epoch + 1, 0
    return finish_epoch(run, stage, logbook)


def take_step(
    run: Run, stage: Stage, batch: Batch, window: Window, logbook: Logbook, signals: StopSignals
) -> Outcome | None:
    """One optimizer step from one loaded batch; returns why training is to stop after it, if so."""
    state, position = run.state, run.state.position
    images, stop, save_asked = _agree(run, stage, batch, logbook, signals)
    inputs = _step_inputs(run, stage, batch, images)
    sums = gradients_within_memory(run, inputs)
    if len(batch.images) == 0:  # the stand-in of a process without images is measured nowhere
        sums = {name: torch.zeros_like(value) for name, value in sums.items()}
    _set_learning_rates(run, stage)
    empty = images == 0
    norms = apply_update(
        state.optimizers[: 1 + (inputs.adversarial_factor is not None)],
        state.update,
        run.config.optim,
        run.fp16,
        empty,
    )
    if "adversarial_sq_norm" in sums:
        measured = torch.stack([sums.pop("reconstruction_sq_norm"), sums.pop("adversarial_sq_norm")])
        measured = run.processes.sum_tensor(measured)
        state.running_sq_norms = update_running(state.running_sq_norms, measured)
        sums["adversarial_factor"] = inputs.adversarial_factor * len(batch.images)
    if state.ema is not None and not empty:
        weight = 1 - ema_decay(run.config.optim.ema_decay, position.step)
        torch._foreach_lerp_(list(state.ema.parameters()), list(state.autoencoder.parameters()), weight)
    position.step += 1
    position.images_in_epoch += run.images_per_step(stage)
    position.images += run.images_per_step(stage)
    window.add(sums, images, norms)
    if save_asked:
        save_here(run, stage)
    if stop:
        return Outcome.SIGNALLED
    limit = run.config.run.max_steps
    return Outcome.ENOUGH_STEPS if limit is not None and position.step >= limit else None


def _agree(
    run: Run, stage: Stage, batch: Batch, logbook: Logbook, signals: StopSignals
) -> tuple[int, bool, bool]:
    """Images of all processes in this step, and whether any process was asked to stop or to save.

    Raises DataError, with a checkpoint saved, where the share of unusable images has grown too large.
    """
    new = {
        rejection.name: str(rejection) for rejection in batch.rejected if rejection.name not in run.rejected
    }
    asked, signals.save = signals.save, False
    images, rejected, stop, save_asked = run.processes.sum_numbers(
        len(batch.images), len(new), signals.stop, asked
    )
    if rejected:
        _reject(run, stage, run.processes.union(set(new.items())), logbook)
    return int(images), stop > 0, save_asked > 0


def _reject(run: Run, stage: Stage, new: set[tuple[str, str]], logbook: Logbook) -> None:
    """Name each image that turned out unusable once; stop where they are too many."""
    for name, line in sorted(new):
        run.rejected.add(name)
        logbook.rejected(line)
    share = run.config.data.max_bad_fraction
    if len(run.rejected) > share * len(run.train_names):
        save_here(run, stage)
        raise DataError(
            f"{len(run.rejected)} of {len(run.train_names)} training images cannot be used, more than "
            f"--max_bad_fraction {share}: listed in {run.output_dir / REJECTED_NAME}; remove them, or allow "
            "them with a larger --max_bad_fraction"
        )


def _step_inputs(run: Run, stage: Stage, batch: Batch, images: int) -> StepInputs:
    """The batch on the device with its noise; a process left without an image adds one of weight 0."""
    device, model = run.processes.device, run.state.autoencoder
    latent = stage.image_size // model.downsampling
    shape = (run.config.model.z_channels, latent, latent)
    pixels = batch.images.to(device, non_blocking=True)
    noise = posterior_noise(batch.epochs, batch.indices, shape, run.config.run.seed, device)
    share = run.processes.world / max(1, images)
    if len(pixels) == 0:
        pixels = torch.zeros(1, 3, stage.image_size, stage.image_size, dtype=torch.uint8, device=device)
        noise = torch.zeros(1, *shape, device=device)
        share = 0.0
    loss, step = run.config.loss, run.state.position.step
    factor = None
    if run.state.discriminator is not None and step >= loss.disc_start:
        adaptive = adaptive_weight(*run.state.running_sq_norms, loss.disc_max_weight)
        factor = adaptive * (loss.adversarial_weight * ramp(step, loss.disc_start, loss.disc_ramp))
    return StepInputs(pixels, noise, share, run.state.update.loss_scale, factor)


def _set_learning_rates(run: Run, stage: Stage) -> None:
    """Learning rates of this step, a function of the position within the stage."""
    optim = run.config.optim
    done, total = run.stage_progress(stage)
    per_epoch = run.steps_per_epoch(stage)
    factor = learning_rate_factor(
        optim.lr_schedule, done, total, warmup_steps(optim.warmup_epochs, per_epoch, total)
    )
    peaks = (optim.learning_rate, run.config.loss.disc_learning_rate)
    for optimizer, peak in zip(run.state.optimizers, peaks, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor


def _open_loader(run: Run, stage: Stage) -> TrainLoader:
    data = run.config.data
    return TrainLoader(
        run.train_dataset(stage),
        local_batch=run.local_batch(stage),
        rank=run.processes.rank,
        world_size=run.processes.world,
        num_workers=run.num_workers,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=data.persistent_workers,
        pin_memory=run.processes.device.type == "cuda",
    )


def _timed(batches: Iterator[Batch], window: Window) -> Iterator[Batch]:
    """The batches, with the time spent waiting for each added to `window`."""
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        window.waited += time.perf_counter() - started
        yield batch


def _progress_bar(run: Run, stage: Stage) -> tqdm:
    done, total = run.stage_progress(stage)
    return tqdm(
        total=total,
        initial=done,
        desc=f"{stage.image_size} px",
        unit="step",
        dynamic_ncols=True,
        disable=None if run.processes.is_main else True,  # None: shown on a terminal, never written to a file
    )
