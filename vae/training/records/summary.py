"""The lines that a run prints about its result, and the command that goes on."""

from pathlib import Path

from vae.config.options import Config
from vae.images.pixels import OFF_BY_ONE_DB
from vae.interop.latent_statistics import LatentConstants
from vae.losses.perceptual import RANDOM_NOTE
from vae.system.console import command_line, counted
from vae.training.checkpoints import position_name
from vae.training.output.logbook import REJECTED_NAME
from vae.training.output.results_image import RESULTS_NAME
from vae.training.schedule import TRAINED, StageSchedule
from vae.training.stages import StageSteps, current_stage
from vae.training.state import TrainingState
from vae.training.validation.measure import Metrics

NOTED_SHARE = 0.2  # of a trained start in the exported weights, from which on it is said
PROBLEMS_PAGE = "docs/monitoring.md#problems-and-remedies"


def progress_line(state: TrainingState, steps: StageSteps) -> str:
    """Epochs with the tenths of an unfinished one, steps and images. `steps` are those of the last stage."""
    position = state.position
    epochs = counted(state.position.epoch, "epoch")
    if current_stage(state.stages, position.epoch) is not None:
        tenths = 10 * position.images_in_epoch // (steps.per_epoch * steps.images)
        epochs = f"{position.epoch}.{tenths} of {state.stages[-1].end_epoch} epochs"
    return f"done: {epochs}, {counted(position.step, 'step')}, {counted(position.images, 'image')}"


def result_lines(
    folder: Path,
    config: Config,
    state: TrainingState,
    baselines: dict[str, Metrics],
    constants: LatentConstants,
    schedule: StageSchedule,
) -> list[str]:
    """Best and last metrics beside the baselines, and the files that were written.

    `schedule`: that of the last stage.
    """
    factor = state.autoencoder.downsampling
    lines = _metrics_lines(config, state, baselines, factor)
    if "psnr" in state.last_validation and "bicubic" in baselines:
        bicubic = f"{factor}x bicubic", baselines["bicubic"]["psnr"]
        begun = state.position.step > config.loss.disc_start + config.loss.disc_warmup
        adversarial = config.loss.adversarial_weight > 0 and begun
        psnr = state.last_validation["psnr"]
        start = state.history.start_psnr
        lines.append(verdict_line(psnr, bicubic, start, schedule.remedy, adversarial))
    lines += _share_of_start(schedule, state)
    if state.most_rejected:
        lines.append(f"skipped {counted(state.most_rejected, 'image')}: {folder / REJECTED_NAME}")
    shown = f"scaling {constants.scaling:.5g}, shift {constants.shift:.5g}"
    if config.model.latent_norm:
        shown = "latent statistics in the file"
    lines.append(f"VAE     {folder / 'vae'} ({shown})")
    if command := command_for_other_programs(folder, config):
        lines.append(f"        for other programs: {command}")
    if any((folder / "samples").glob("*.png")):
        columns = f"input, reconstruction, error x8, {factor}x bicubic"
        lines.append(f"samples {folder / 'samples'} ({columns})")
    if (folder / RESULTS_NAME).is_file():
        lines.append(f"curves  {folder / RESULTS_NAME}")
    return lines


def _share_of_start(schedule: StageSchedule, state: TrainingState) -> list[str]:
    """A line if the EMA weights, which are exported, still have much of a trained start: decay ** steps."""
    decay = schedule.ema_decay(state.position)
    share = decay ** schedule.steps.done(state.position)
    if state.ema is None or schedule.start != TRAINED or share < NOTED_SHARE:
        return []
    return [
        f"note    {share:.0%} of the exported weights is still the start, by --ema_decay {decay:g}: train "
        "for more steps, lower it, or export the last weights of a checkpoint with --weights raw"
    ]


def command_for_other_programs(folder: Path, config: Config) -> str:
    """The command that writes a file which other programs read, if they do not read FOLDER/vae; else ""."""
    command = ["python", "export_vae.py", "--vae", str(folder / "vae")]
    output = f"exported/{folder.absolute().name}"
    if config.model.decoder:
        return command_line(*command, "--output", output)
    if config.model.family == "wan":
        start = config.model.init_from or "VIDEO_VAE"
        ending = ".safetensors" if start.lower().endswith((".safetensors", ".sft")) else ""
        return command_line(*command, "--into", start, "--output", output + ending)
    return ""


def _metrics_lines(
    config: Config, state: TrainingState, baselines: dict[str, Metrics], factor: int
) -> list[str]:
    best = state.history.best
    last = state.last_validation
    measured = {}
    if best.get("image_size") == last.get("image_size", best.get("image_size")) and "psnr" in best:
        name = "start" if state.history.best_is_start else f"epoch {int(best['epoch'])}"
        is_passed = "psnr" in last and last["psnr"] > best["psnr"]  # by the last steps of --max_steps
        measured[name if is_passed else f"{name} (best)"] = best
    if "psnr" in last and last != best:
        measured[f"step {state.validated_step}"] = last
    if not measured:
        return []
    names = {"bicubic": f"{factor}x bicubic", "mean_colour": "mean colour"}
    lines = [_metrics_line(name, values) for name, values in measured.items()]
    lines += [_metrics_line(names[name], values) for name, values in sorted(baselines.items())]
    lines.append(
        f"PSNR is the mean of the images, each up to {OFF_BY_ONE_DB:.2f} dB (every value off by one)"
    )
    if not any("lpips" in values for values in measured.values()):
        lines.append("LPIPS was not measured: the loss does not contain it")
    elif config.loss.perceptual_net == "random":
        lines.append(RANDOM_NOTE)
    return lines


def _metrics_line(name: str, values: Metrics) -> str:
    lpips = f"   LPIPS {values['lpips']:.4f}" if "lpips" in values else ""
    return f"{name:<16} PSNR {values['psnr']:6.2f} dB   SSIM {values['ssim']:.4f}{lpips}"


def verdict_line(
    psnr: float, bicubic: tuple[str, float], start_psnr: float | None, remedy: str, adversarial: bool = False
) -> str:
    """One sentence: whether the VAE is better than bicubic and than its start, and what to do if it is not.

    PSNR values in dB; `bicubic` is the baseline's name and PSNR, `start_psnr` that before the stage.
    `remedy`: what helps if PSNR has fallen below it.
    """
    rivals = [(f"{bicubic[0]} ({bicubic[1]:.2f} dB)", bicubic[1])]
    if start_psnr is not None:
        rivals.append((f"at the start of the stage ({start_psnr:.2f} dB)", start_psnr))
    won = [name for name, value in rivals if round(psnr, 2) > round(value, 2)]
    lost = [name for name, _ in rivals if name not in won]
    parts = ["better than " + " and than ".join(won)] if won else []
    parts += ["not better than " + " or than ".join(lost)] if lost else []
    line = f"result  the VAE ({psnr:.2f} dB) is " + ", but ".join(parts)
    if not lost:
        return line
    fell = start_psnr is not None and not round(psnr, 2) >= round(start_psnr, 2)  # also if it is NaN
    remedy = remedy if fell else "train for more epochs"
    if adversarial:
        remedy += "; the adversarial loss may lower PSNR, so compare the samples too"
    return f"{line}: {remedy} ({PROBLEMS_PAGE})"


def next_command(folder: Path, resumed_from: Path | None, state: TrainingState) -> str:
    """The command that finishes an unfinished run, or trains a finished one further."""
    path = folder / position_name(state.position)
    if resumed_from and not path.exists():  # no step was left, and the export went to another folder
        path = resumed_from
    is_finished = current_stage(state.stages, state.position.epoch) is None
    more = ["--num_epochs", "10"] if is_finished else []
    return command_line("python", "train_vae.py", "--resume_from", path, *more)
