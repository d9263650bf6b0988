"""Lines that a run prints: at first the stage and warnings, at last the result and the next command."""

import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from vae.config.model_options import ModelConfig
from vae.config.options import Config, DataConfig, SpeedConfig
from vae.data.image_files import ImageSet
from vae.images.pixels import OFF_BY_ONE_DB
from vae.losses.perceptual import RANDOM_NOTE
from vae.losses.terms import LossTerms
from vae.memory.plan import checkpoint_bytes
from vae.model.autoencoder import AutoencoderKL
from vae.sampling.buckets import Shape
from vae.shards.dataset_json import is_dataset
from vae.shards.shard_cache import default_folder
from vae.system import console
from vae.system.addresses import public_text
from vae.system.console import command_line, counted
from vae.system.files import nearest_existing
from vae.system.gpus import match_card
from vae.system.host import GIB
from vae.training.checkpoints import position_name
from vae.training.distributed import Distributed
from vae.training.logbook import REJECTED_NAME
from vae.training.results_image import RESULTS_NAME
from vae.training.run_folder import checkpoint_paths
from vae.training.schedule import StageSchedule, warmup_steps
from vae.training.setup import PreparedRun
from vae.training.stage_memory import StagePlan, plan_line
from vae.training.stages import Position, Stage, StageSteps, current_stage, stages_left
from vae.training.state import TrainingState
from vae.training.validation import Metrics, adversarial_share, loss_of, metrics_text

MILLION = 1e6
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16 with loss scaling"}


def print_remarks(run: PreparedRun) -> None:
    """Print what makes this run slow, its start bad, or its disk full."""
    if warning := space_warning(run.output_dir, run.config, run.state.stages, run.state.position):
        console.warning(warning)
    loss = run.config.loss
    if loss.perceptual_weight and loss.perceptual_net == "random":
        console.warning(RANDOM_NOTE)
    if not (run.provenance.resumed_from or run.config.model.init_from or loss.teacher):
        console.info(
            "note: this is a new VAE: no existing SDXL or FLUX model can read its latents, it is made for a "
            "diffusion model of its own. --profile decoder improves the VAE of an existing one (docs/jobs.md)"
        )


def print_stage(run: PreparedRun, schedule: StageSchedule, plan: StagePlan) -> None:
    """Print what is about to be trained: model, data, loss, device, memory, steps and folder."""
    config = run.config
    state = run.state
    steps = schedule.steps
    size = run.state.stage.image_size
    start = f"{config.model.init} start"
    if state.position.step > state.begun_at.step:  # a later stage of this command
        start = f"goes on at step {state.position.step}"
    elif run.provenance.resumed_from:
        start = f"from {run.provenance.resumed_from}, step {state.position.step}"
    elif config.model.init_from:
        start = f"from {config.model.init_from}"
    if config.optim.train_part == "decoder":
        start += ", trains the decoder only"
    validation = run.validation_set.count if run.validation_set else 0
    sets = [part.images for part in (run.training_set, run.validation_set) if part]
    shapes = run.training_set.shapes(config, size)
    lines = [
        f"model   {model_line(config.model, state.autoencoder)}; {start}",
        f"data    {data_line(config.data, run.training_set.num_images, validation)}; "
        f"{crops_text(config.data.crop, size, shapes)}, {console.counted(run.num_workers, 'worker')}",
        cache_line(config.data, sets),
        f"loss    {loss_line(run.networks.terms, schedule)}",
        f"device  {device_line(run.dist, config.speed, run.networks.dtype, run.compiled)}",
        f"plan    {plan_line(plan, size, steps.local_images, config.speed.micro_batch_size)}",
        f"steps   {steps_line(schedule)}",
        f"output  {run.output_dir}   "
        f"({console.command_line('tensorboard', '--logdir', run.output_dir / 'logs')})",
        late_discriminator_note(schedule, state.position.step, run.config.run.max_steps),
    ]
    console.info("\n".join(filter(None, lines)))


def model_line(config: ModelConfig, model: AutoencoderKL) -> str:
    """Return the size and shape of the autoencoder."""
    parameters = sum(p.numel() for p in model.parameters()) / MILLION
    is_other = config.decoder_channels or config.decoder
    own = f" (decoder {' '.join(map(str, config.up_channels))})" if is_other else ""
    scale = config.up_scale
    enlarged = (
        f", decoded at {scale} times the size (the encoder reads crops at 1/{scale})" if scale > 1 else ""
    )
    return (
        f"{parameters:.1f} M parameters, channels {' '.join(map(str, config.channels))}{own}, "
        f"{config.z_channels} latent channels, {model.encoder_downsampling}x downsampling{enlarged}"
    )


def data_line(config: DataConfig, training: int, validation: int) -> str:
    """Return the numbers of training and validation images."""
    shown = f"{validation} for validation" if validation else "none for validation"
    return f"{training} images of {public_text(' '.join(config.data_path))}, {shown}"


def crops_text(crop: str, image_size: int, shapes: Sequence[Shape] | None) -> str:
    """Return the size of the training crops, or their shapes as width x height."""
    if shapes is None:
        return f"{image_size} px {crop} crops"
    texts = [f"{width}x{height}" for height, width in shapes]
    return f"{image_size} px {crop} crops of {console.counted(len(texts), 'shape')} ({', '.join(texts)})"


def loss_line(terms: LossTerms, schedule: StageSchedule) -> str:
    """Return the weighted terms of the loss, and when the discriminator begins."""
    parts = [f"{term.weight:g} {term.label}" for term in terms.all]
    loss = schedule.loss
    if loss.adversarial_weight:
        alone = f" (discriminator from step {schedule.disc_first_step})" if loss.disc_warmup else ""
        parts.append(
            f"{loss.adversarial_weight:g} adversarial from step {schedule.adversarial_first_step}{alone}"
        )
    return " + ".join(parts)


def late_discriminator_note(schedule: StageSchedule, step: int, max_steps: int | None) -> str | None:
    """Return a note if --max_steps stops a run that is at `step` before the adversarial loss begins."""
    first = schedule.adversarial_first_step
    if not schedule.loss.adversarial_weight or max_steps is None or not step < max_steps <= first:
        return None
    return f"note: --max_steps {max_steps} stops this run before the adversarial loss begins (step {first})"


def device_line(dist: Distributed, speed: SpeedConfig, dtype: torch.dtype, compiled: bool) -> str:
    """Return the device, the number of processes, the precision and the speed settings in use."""
    device = dist.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = match_card(properties.name, properties.total_memory / GIB)
        name = properties.name
        if known is None or known.bf16_tflops is None:
            name += ", no profile: settings come from its memory"
    else:
        name = console.counted(torch.get_num_threads(), "thread")
    extras = ["TF32"] if speed.enable_tf32 and device.type == "cuda" else []
    extras += ["channels_last"] * speed.channels_last + ["compiled"] * compiled
    world = f", {dist.world_size} processes" if dist.world_size > 1 else ""
    return f"{device.type} ({name}){world}, " + ", ".join([DTYPE_NAMES[dtype], *extras])


def cache_line(data: DataConfig, sets: Iterable[ImageSet]) -> str | None:
    """Name the folder in which the shards of these sets are kept, if they are; None for image files."""
    if any(len(images.cached_bytes) for images in sets):
        return f"cache   at most {data.cache_gib:g} GiB of shards in {data.cache_dir or default_folder()}"
    if not any(path and is_dataset(path) for path in (*data.data_path, data.val_path)):
        return None
    return "cache   none, shards are read in place (from a shared disk, --cache_dir keeps them here)"


def steps_line(schedule: StageSchedule) -> str:
    """Return the number of steps, epochs and the learning-rate schedule of a stage."""
    steps = schedule.steps
    optim = schedule.optim
    count = schedule.divergences
    halved = f", halved by {counted(count, 'divergence')}" if count else ""
    warm_up = warmup_steps(optim.warmup_epochs, steps.per_epoch, steps.total)
    stage = steps.stage
    epochs = f"epochs {stage.first_epoch + 1} to {stage.end_epoch}, {steps.per_epoch} steps each"
    if stage.num_steps is not None:
        epochs = f"{steps.total / steps.per_epoch:.3g} epochs of {counted(steps.per_epoch, 'step')}"
    return (
        f"{steps.total} of {steps.images} images: {epochs}; "
        f"{warm_up} of warm-up, then {optim.lr_schedule} from {schedule.peak:.3g}{halved}"
    )


def space_warning(folder: Path, config: Config, stages: list[Stage], position: Position) -> str | None:
    """Return the warning that the checkpoints and the export may not fit on the disk of `folder`."""
    size = checkpoint_bytes(config)
    options = config.run
    left = stages_left(stages, position)
    max_saves = sum(stage.num_steps or stage.num_epochs or 0 for stage in left)
    begun = position.epoch - left[0].first_epoch if left else 0
    saves = math.inf if options.checkpoint_steps else max_saves - begun
    if options.max_steps is not None:
        saves = min(saves, options.max_steps - position.step)
    # With the best ones, and the one that is being written; a signal also saves.
    kept = options.keep_checkpoints + len(stages) + 2 + (config.loss.adversarial_weight > 0)
    try:
        paths = checkpoint_paths(folder)
        existing = sum(path.stat().st_size for path in paths)
        free = shutil.disk_usage(nearest_existing(folder)).free
    except OSError:  # nobody knows
        return None
    count = int(min(kept, len(paths) + saves + 1))
    export = size // 4  # fp32 weights: a checkpoint also has EMA weights and two moments
    needed = count * size + export - existing
    if needed <= free:
        return None
    return (
        f"--output_dir {folder} has {free / GIB:.2f} GiB free, but this run writes up to {needed / GIB:.2f} "
        f"GiB ({count} checkpoints of {size / GIB:.2f} GiB, and the export): free some space, lower "
        f"--keep_checkpoints {config.run.keep_checkpoints}, or use another disk"
    )


# ---- The result ----------------------------------------------------------------------------------------


PROBLEMS_PAGE = "docs/monitoring.md#problems-and-remedies"


def progress_line(state: TrainingState, steps: StageSteps) -> str:
    """Return epochs with tenths of an unfinished one, steps and images. `steps`: those of the last stage."""
    position = state.position
    epochs = counted(position.epoch, "epoch")
    is_finished = current_stage(state.stages, position) is None
    if position.images_in_epoch or not is_finished:
        tenths = 10 * position.images_in_epoch // (steps.per_epoch * steps.images)
        in_steps = any(stage.num_steps is not None for stage in state.stages)
        last = "" if is_finished or in_steps else f" of {state.stages[-1].end_epoch}"
        epochs = f"{position.epoch}.{tenths}{last} epochs"
    return f"done: {epochs}, {counted(position.step, 'step')}, {counted(position.images, 'image')}"


def result_lines(
    folder: Path,
    config: Config,
    state: TrainingState,
    baselines: dict[str, Metrics],
    constants: str,
    schedule: StageSchedule,
) -> list[str]:
    """Best and last metrics beside the baselines, and the files that were written.

    `constants`: those in the file, for people. `schedule`: that of the last stage.
    """
    factor = state.autoencoder.downsampling
    lines = _metrics_lines(config, state, baselines, factor)
    if "loss" in state.last_validation and "bicubic" in baselines:
        bicubic = f"{factor}x bicubic", baselines["bicubic"]["loss"]
        loss = state.last_validation["loss"]
        begun = schedule.adversarial_share(state.position.step) > 0  # it raises the loss on purpose
        start = None if begun else state.history.start.get("loss")
        lines.append(verdict_line(loss, bicubic, start, schedule.remedy))
    if state.most_rejected:
        lines.append(f"skipped {counted(state.most_rejected, 'image')}: {folder / REJECTED_NAME}")
    lines.append(f"VAE     {folder / 'vae'} ({constants}): {export_text(folder, state, schedule)}")
    if command := command_for_other_programs(folder, config):
        lines.append(f"        for other programs: {command}")
    if any((folder / "samples").glob("*.png")):
        columns = f"input, reconstruction, error x8, {factor}x bicubic"
        lines.append(f"samples {folder / 'samples'} ({columns})")
    if (folder / RESULTS_NAME).is_file():
        lines.append(f"curves  {folder / RESULTS_NAME}")
    return lines


def export_text(folder: Path, state: TrainingState, schedule: StageSchedule) -> str:
    """Name the exported weights and the reason, with the command that exports better ones."""
    history, last = state.history, state.last_validation
    name, which = history.best_checkpoint, "the best validation loss has"
    text = "the last weights"
    if schedule.adversarial_share(state.position.step):
        text += ", because the adversarial loss moved them on purpose"
        # within the ramp, the best one is that before it
        began = adversarial_share(history.best) > 0
        name, which = history.before_adversarial if began else name, "the best before it is"
    elif last and history.is_comparable(last) and loss_of(last) <= loss_of(history.best):
        return f"{text}, which have the best validation loss"
    if name is None or not (folder / name).is_file() or name == position_name(state.position):
        return text
    output = f"exported/{folder.absolute().name}-{Path(name).stem}"
    command = command_line("python", "export_vae.py", "--vae", folder / name, "--output", output)
    return f"{text}; {which} {name}: {command}"


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
    if best.get("image_size") == last.get("image_size", best.get("image_size")) and "loss" in best:
        name = "start" if state.history.best_is_start else f"epoch {best['epoch']}"
        # by the last steps of --max_steps
        is_passed = state.history.is_comparable(last) and loss_of(last) < best["loss"]
        measured[name if is_passed else f"{name} (best)"] = best
    if "loss" in last and last != best:
        measured[f"step {state.validated_step}"] = last
    if not measured:
        return []
    names = {"bicubic": f"{factor}x bicubic", "mean_colour": "mean colour"}
    rows = [*measured.items(), *((names[name], values) for name, values in sorted(baselines.items()))]
    lines = [f"{name:<16} {metrics_text(values, '   ')}" for name, values in rows]
    lines.append(
        f"loss is {state.history.loss} of the validation images, lower is better; PSNR is the mean of the "
        f"images, each up to {OFF_BY_ONE_DB:.2f} dB (every value off by one)"
    )
    if not any("lpips" in values for values in measured.values()):
        lines.append("LPIPS was not measured: the loss does not contain it")
    elif config.loss.perceptual_net == "random":
        lines.append(RANDOM_NOTE)
    return lines


def verdict_line(loss: float, bicubic: tuple[str, float], start: float | None, remedy: str) -> str:
    """Compare the VAE with bicubic and with its start in one sentence, with the remedy if it is not better.

    Values of the validation loss; `bicubic` is the baseline's name and loss, `start` that before the stage.
    `remedy`: what helps if the loss has risen above it.
    """
    rivals = [(f"{bicubic[0]} ({bicubic[1]:.4f})", bicubic[1])]
    if start is not None:
        rivals.append((f"at the start of the stage ({start:.4f})", start))
    won = [name for name, value in rivals if round(loss, 4) < round(value, 4)]
    lost = [name for name, _ in rivals if name not in won]
    parts = ["better than " + " and than ".join(won)] if won else []
    parts += ["not better than " + " or than ".join(lost)] if lost else []
    line = f"result  the VAE (loss {loss:.4f}) is " + ", but ".join(parts)
    if not lost:
        return line
    rose = start is not None and not round(loss, 4) <= round(start, 4)  # also if it is NaN
    return f"{line}: {remedy if rose else 'train for more epochs'} ({PROBLEMS_PAGE})"


def next_command(folder: Path, resumed_from: Path | None, state: TrainingState) -> str:
    """Return the command that finishes an unfinished run, or trains a finished one further."""
    path = folder / position_name(state.position)
    if resumed_from and not path.exists():  # no step was left, and the export went to another folder
        path = resumed_from
    more: list[str] = []
    if current_stage(state.stages, state.position) is None:
        num_steps = state.stages[-1].num_steps
        more = ["--num_epochs", "10"] if num_steps is None else ["--num_steps", str(max(1, num_steps // 10))]
    return command_line("python", "train_vae.py", "--resume_from", path, *more)
