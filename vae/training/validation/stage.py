"""The validations of a stage: all validation images, and the smoke set, a few of them that guard between."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from vae.config.options import LossConfig
from vae.device import is_out_of_memory
from vae.evaluation.sums import Sums
from vae.system import console
from vae.system.errors import UserError
from vae.training.context import RunContext, StageContext
from vae.training.memory.oom_retry import free_memory, release_graph
from vae.training.recovery.signals import LoadingStoppedError
from vae.training.state import TrainingState
from vae.training.validation.measure import (
    Measure,
    Metrics,
    baseline_metrics,
    validation_line,
    validation_metrics,
)
from vae.training.validation.slices import Slices, slice_record, slice_text

# A channel with this noise carries at most 0.5 * log2(1 + 1 / 0.5**2) = 1.2 bit per value (Shannon 1948).
MAX_SIGMA_OVER_STD = 0.5
Batches = Callable[[], Iterator[torch.Tensor]]  # from the first one on; called again if memory runs out


def measure_baselines(run: RunContext, ctx: StageContext, factor: int) -> dict[str, Metrics]:
    """The metrics of both baselines on all validation images."""
    return baseline_metrics(run.networks, _holdout(run, ctx, Slices()), factor, run.dist)


def validate(run: RunContext, ctx: StageContext, state: TrainingState, when: str, epoch: int) -> Metrics:
    """Validate the weights, write a record and print a line; warn if training has made them worse."""
    position, loss = state.position, run.config.loss
    started = time.perf_counter()
    slices = _slices(run, ctx)
    measure = _holdout(run, ctx, slices)
    measured, by_label = validation_metrics(state.eval_model, run.networks, measure, run.dist, slices)
    speed, of_slices = _speed(measured, started), slice_record(by_label)
    metrics = {"epoch": epoch, "image_size": ctx.stage.image_size, **measured}
    state.last_validation, state.validated_step = metrics, position.step
    state.history.last_psnr = metrics.get("psnr")
    ctx.logbook.record("validation", position.step, {**metrics, **speed, **of_slices})
    ctx.logbook.draw_results()
    baseline = ctx.baselines.get("bicubic", {})
    line = validation_line(when, metrics, baseline, state.autoencoder.downsampling)
    console.info(line + slice_text(of_slices))
    _warn_of_noise(state, metrics, loss)
    adversarial = loss.adversarial_weight > 0 and position.step > loss.disc_start
    if "psnr" in metrics and not adversarial:  # the adversarial term may lower PSNR
        warning = state.history.decrease_warning(metrics["psnr"], run.config.optim, ctx.peak)
        if warning:
            console.warning(warning)
    return metrics


def _warn_of_noise(state: TrainingState, metrics: Metrics, loss: LossConfig) -> None:
    """Warn, once per command, that the posterior's noise hides the latents."""
    ratio = metrics.get("sigma_over_std", 0.0)
    if ratio > MAX_SIGMA_OVER_STD and not state.noise_reported:
        state.noise_reported = True
        console.warning(
            f"the noise of the latents is {ratio:.2f} times as large as their spread (more than "
            f"{MAX_SIGMA_OVER_STD}), so they lose what the image contains: lower --kl_weight (now "
            f"{loss.kl_weight:g})"
        )


def validate_smoke_set(run: RunContext, ctx: StageContext, state: TrainingState) -> bool:
    """Measure the smoke set and write a record; whether its PSNR has just fallen, which prints a warning.

    Its crops stay in main memory from the first time on: decoding would cost more than measuring.
    """
    options, started = run.config.run, time.perf_counter()
    measure = partial(_measure, run, ctx, lambda: _smoke_batches(run, ctx))
    measured, _ = validation_metrics(state.eval_model, run.networks, measure, run.dist, Slices())
    metrics = {"image_size": ctx.stage.image_size, **measured}
    ctx.logbook.record("smoke", state.position.step, {**metrics, **_speed(measured, started)})
    warning = state.history.guard_warning(metrics, options.guard_psnr)
    if warning:
        console.warning(f"step {state.position.step}: {warning}")
    return warning is not None


def _speed(measured: Metrics, started: float) -> dict[str, float]:
    """The throughput of a validation that began at `started`, with decoding and all processes."""
    return {"images_per_second": measured["images"] / max(1e-9, time.perf_counter() - started)}


def _slices(run: RunContext, ctx: StageContext) -> Slices:
    """The slices of the validation set, whose labels are read once in a stage."""
    if ctx.slices is None:
        assert run.validation_set is not None
        found = {index: run.validation_set.label(index) for index in run.validation_set.share(run.dist)}
        ctx.slices = Slices.of(found, run.dist)
    return ctx.slices


def _holdout(run: RunContext, ctx: StageContext, slices: Slices) -> Measure:
    return partial(_measure, run, ctx, lambda: _batches(run, ctx, slices))


def _batches(run: RunContext, ctx: StageContext, slices: Slices) -> Iterator[torch.Tensor]:
    assert run.validation_set is not None
    size, batch_size, data = ctx.stage.image_size, _batch_size(ctx), run.config.data
    slices.measured.clear()
    for images in run.validation_set.batches(
        data, size, batch_size, run.num_workers, run.dist, ctx.check_waiting, slices.measured
    ):
        ctx.watchdog.beat()
        yield images


def _smoke_batches(run: RunContext, ctx: StageContext) -> Iterator[torch.Tensor]:
    if ctx.smoke_crops is None:
        assert run.validation_set is not None
        chosen = run.validation_set.spread(run.config.run.smoke_images)
        on_cpu = replace(run.dist, device=torch.device("cpu"))
        data, size = run.config.data, ctx.stage.image_size
        crops = []
        for crop in chosen.batches(data, size, 1, run.num_workers, on_cpu, ctx.check_waiting):
            ctx.watchdog.beat()
            crops.append(crop)
        ctx.smoke_crops = crops
    for first in range(0, len(ctx.smoke_crops), _batch_size(ctx)):
        images = torch.cat(ctx.smoke_crops[first : first + _batch_size(ctx)])
        ctx.watchdog.beat()
        yield images.to(run.dist.device, non_blocking=True)


def _batch_size(ctx: StageContext) -> int:
    return ctx.validation_batch or ctx.settings.micro_batch


def _measure(
    run: RunContext,
    ctx: StageContext,
    batches: Batches,
    sums_of: Callable[[Iterator[torch.Tensor]], dict[str, Sums]],
) -> dict[str, Sums]:
    """The sums over this process's validation batches, smaller ones if memory runs out.

    If that fails on one process, all of them raise an error.
    """
    failure, found = None, None
    while found is None and failure is None:
        try:
            found = sums_of(batches())
            continue
        except (UserError, LoadingStoppedError) as error:
            failure = error
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Not within the except clause: there, the exception keeps the tensors of the batch alive.
        size = _batch_size(ctx)
        ctx.settings.out_of_memory += 1
        if release_graph(ctx.settings, run.networks):
            continue
        if size == 1:
            line = f"out of memory in a validation with one image of {ctx.stage.image_size} px"
            failure = UserError(f"{line}: lower --image_size, and resume with: {run.resume_command}")
            continue
        ctx.validation_batch = size // 2
        free_memory(run.networks)
        console.info(f"out of memory: validation batch lowered to {size // 2}; same metrics")
    if run.dist.all_reduce_scalars(failure is not None)[0] or found is None:
        raise failure or UserError("validation failed on another process, which reports the reason")
    return found
