"""What comes between steps: the log record, the sample sheet, the validation that ends an epoch."""

import math
import time
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

from vae.config.errors import NonFiniteError
from vae.training.checkpoints import epoch_name, latest_command
from vae.training.logbook import Logbook, say
from vae.training.saving import save
from vae.training.setup import Run
from vae.training.stage_memory import memory_in_use
from vae.training.stages import Stage
from vae.training.validation_set import SHEET_IMAGES, baseline_metrics, sample_sheet, validation_metrics

SQUARED_RANGE = 4.0  # of values in [-1, 1], for PSNR from the mean squared error


@dataclass
class Window:
    """What has been summed since the last record; tensors stay on the device until it is written."""

    started: float = field(default_factory=time.perf_counter)
    step_ended: float = field(default_factory=time.perf_counter)
    waited: float = 0.0  # seconds without a batch
    paused: float = 0.0  # seconds of validations, samples and checkpoints
    images: float = 0.0  # of all processes
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # of this process
    norms: list[torch.Tensor] = field(default_factory=list)  # of the last step

    def add(self, sums: dict[str, torch.Tensor], images: float, norms: list[torch.Tensor]) -> None:
        """Add one step's sums over images."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.images += images
        self.norms = norms
        self.step_ended = time.perf_counter()

    def forget_pause(self) -> None:
        """Count what has passed since the last step as no training time."""
        self.paused += time.perf_counter() - self.step_ended

    def clear(self) -> None:
        """Begin anew."""
        self.__init__()


def log(run: Run, window: Window, logbook: Logbook, bar: tqdm) -> None:
    """Write the record of the steps since the last one; the only place of a step that waits for the device.

    Raises NonFiniteError after too many skipped steps in a row.
    """
    names = sorted(window.sums)
    stacked = run.processes.sum_tensor(torch.stack([window.sums[name] for name in names]))
    means = dict(zip(names, (stacked / max(1.0, window.images)).tolist(), strict=True))
    now = time.perf_counter()
    seconds = max(1e-9, now - window.started - window.paused)
    loss = run.config.loss
    mse = means.pop("mse")
    record = {
        "epoch": run.state.position.epoch + 1,  # the one being trained, counted from 1
        "loss": loss.reconstruction_weight * means["reconstruction"]
        + loss.perceptual_weight * means.get("perceptual", 0.0)
        + loss.kl_weight * means["kl"],
        **means,
        "psnr": 10 * math.log10(SQUARED_RANGE / mse) if 0 < mse < math.inf else math.nan,
        "learning_rate": run.state.optimizers[0].param_groups[0]["lr"],
        "gradient_norm": float(window.norms[0]),
        "images_per_second": window.images / seconds,
        "data_wait_share": window.waited / seconds,
        "nonfinite_steps": int(run.state.update.nonfinite_total),
        **memory_in_use(run.processes.device),
    }
    if run.fp16:
        record["loss_scale"] = float(run.state.update.loss_scale)
    logbook.record("train", run.state.position.step, record)
    shown = (
        f"{record['images_per_second']:.2f} images/s, loss {record['loss']:.4f}, PSNR {record['psnr']:.2f}"
    )
    bar.set_postfix_str(shown)
    if bar.disable and run.processes.is_main:  # no terminal: a log file gets lines instead
        say(f"step {run.state.position.step}: {shown}")
    _check_finite(run)
    window.clear()


def _check_finite(run: Run) -> None:
    streak, limit = int(run.state.update.nonfinite_streak), run.config.optim.max_nonfinite_steps
    if streak >= limit:
        raise NonFiniteError(
            f"{streak} steps in a row had a non-finite gradient (--max_nonfinite_steps {limit}): lower "
            f"--learning_rate or use --use_bf16, and go on with: {latest_command(run.output_dir)}"
        )


def save_samples(run: Run, stage: Stage, logbook: Logbook) -> None:
    """A sheet of the first held-out images: input, reconstruction, error x 8, trivial codec."""
    if run.held is None or not run.processes.is_main:
        return
    names = run.held.names[:SHEET_IMAGES]
    batches = replace(run.held, names=names).batches(
        run.config.data, stage.image_size, SHEET_IMAGES, 0, replace(run.processes, world=1)
    )
    for images in batches:
        sheet = sample_sheet(run.state.shipped, run.networks, images)
        logbook.image("samples", run.state.position.step, sheet)


def measure_start(run: Run, stage: Stage, logbook: Logbook) -> None:
    """Baselines on the held-out images, and the state the stage begins with, which is said too."""
    first = run.state.position.epoch == stage.first_epoch and run.state.position.images_in_epoch == 0
    if first:
        run.state.history.without_gain, run.state.history.start_psnr = 0, None
    if run.held is None:
        return
    batches = _held_batches(run, stage)
    run.held.baselines = baseline_metrics(
        run.networks, batches, run.state.autoencoder.downsampling, run.processes
    )
    for name, values in run.held.baselines.items():
        logbook.record(
            "baseline", run.state.position.step, {"codec": name, "image_size": stage.image_size} | values
        )
    if first:
        metrics = _validate(run, stage, logbook)
        _say_validation(run, "start", metrics)
        run.state.history.start_psnr = metrics.get("psnr")


def _held_batches(run: Run, stage: Stage):
    return run.held.batches(
        run.config.data, stage.image_size, run.micro_batch, run.num_workers, run.processes
    )


def _validate(run: Run, stage: Stage, logbook: Logbook) -> dict[str, float]:
    position = run.state.position
    metrics = validation_metrics(run.state.shipped, run.networks, _held_batches(run, stage), run.processes)
    run.newest = {"epoch": position.epoch, "image_size": stage.image_size, **metrics}
    run.validated_step = position.step
    logbook.record("validation", position.step, run.newest)
    return run.newest


def validate_end(run: Run, stage: Stage, logbook: Logbook) -> None:
    """Measure what is about to be shipped, where --max_steps ended the run between two validations."""
    if run.held is not None and run.validated_step != run.state.position.step:
        _say_validation(run, f"step {run.state.position.step}", _validate(run, stage, logbook))


def _say_validation(run: Run, when: str, metrics: dict[str, float]) -> None:
    """One line on the console; once a stage another where training has made the network worse."""
    history, loss = run.state.history, run.config.loss
    if run.processes.is_main:
        say(validation_line(run, when, metrics))
    start, psnr = history.start_psnr, metrics.get("psnr", math.inf)
    adversarial = loss.adversarial_weight > 0 and run.state.position.step > loss.disc_start
    if start is None or adversarial or round(psnr, 2) >= round(start, 2):  # that term may cost PSNR
        return
    history.start_psnr = None
    if run.processes.is_main:
        say(
            f"WARNING: PSNR {psnr:.2f} dB is below the {start:.2f} dB this stage began with: if it stays so, "
            f"lower --learning_rate (now {run.config.optim.learning_rate:g}), lengthen --warmup_epochs (now "
            f"{run.config.optim.warmup_epochs:g}) or train more epochs"
        )


def finish_epoch(run: Run, stage: Stage, logbook: Logbook) -> Stage:
    """Validate and save where they are due; returns the stage, shorter where --early_stopping ends it."""
    options, epochs = run.config.run, run.state.position.epoch
    last = epochs == stage.end_epoch
    save_due = epochs % options.checkpoint_freq == 0 or last
    metrics = None
    if run.held is not None and (epochs % options.val_freq == 0 or save_due):
        metrics = _validate(run, stage, logbook)
        _follow_history(run, metrics)
        _say_validation(run, f"epoch {epochs}", metrics)
        if options.early_stopping and run.state.history.without_gain >= options.early_stopping and not last:
            if run.processes.is_main:
                say(f"--early_stopping {options.early_stopping}: no better PSNR for so long, the stage ends")
            stage = _shorten_stage(run, stage)
            save_due = True
    if save_due:
        history = run.state.history
        if metrics and "psnr" in metrics and metrics["psnr"] > (history.best_checkpoint_psnr or -math.inf):
            history.best_checkpoint, history.best_checkpoint_psnr = epoch_name(epochs), metrics["psnr"]
        save(run, stage, epoch_name(epochs), required=epochs == run.stages[-1].end_epoch)
    return stage


def _follow_history(run: Run, metrics: dict[str, float]) -> None:
    history = run.state.history
    same_size = history.best.get("image_size") == metrics["image_size"]
    if not same_size or metrics.get("psnr", -math.inf) > history.best.get("psnr", -math.inf):
        if not same_size:  # another resolution is another measure
            history.best_checkpoint_psnr = None
        history.best, history.without_gain = metrics, 0
    else:
        history.without_gain += 1


def _shorten_stage(run: Run, stage: Stage) -> Stage:
    """The stage cut off at this epoch; those behind it move up."""
    index = run.stages.index(stage)
    short = replace(stage, num_epochs=run.state.position.epoch - stage.first_epoch)
    saved = stage.end_epoch - short.end_epoch
    later = [replace(s, first_epoch=s.first_epoch - saved) for s in run.stages[index + 1 :]]
    run.stages = [*run.stages[:index], short, *later]
    return short


def validation_line(run: Run, when: str, metrics: dict[str, float]) -> str:
    """One line: this validation beside the baseline."""

    def shown(name: str, values: dict[str, float]) -> str:
        parts = (
            [f"PSNR {values['psnr']:.2f}", f"SSIM {values['ssim']:.4f}"] if "psnr" in values else ["nothing"]
        )
        if "lpips" in values:
            parts.append(f"LPIPS {values['lpips']:.4f}")
        return f"{name} " + " ".join(parts)

    trivial = f"{run.state.autoencoder.downsampling}x bicubic"
    values = run.held.baselines.get("bicubic", {})
    return f"{when}: {shown('VAE', metrics)} | {shown(trivial, values)}"
