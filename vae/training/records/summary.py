"""The lines that a run prints about itself before a stage and at its end."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vae.config.options import Config, DataConfig, LossConfig, ModelConfig, OptimConfig, SpeedConfig
from vae.images.psnr import OFF_BY_ONE_DB
from vae.interop.latent_statistics import LatentConstants
from vae.losses.perceptual import RANDOM_NOTE
from vae.losses.terms import LossTerms
from vae.model.autoencoder import IMAGE_CHANNELS, AutoencoderKL, downsampling
from vae.model.initialization import carriers_per_group, distinct_latents
from vae.sampling.buckets import Buckets
from vae.sampling.mixture import MixtureOrder
from vae.sampling.streams import StreamOrder, shards_at_once, streams_of_process
from vae.shards.dataset_json import is_dataset
from vae.shards.mixture import dataset_paths
from vae.shards.shard_cache import default_folder, has_remote_shards
from vae.system.addresses import public_text
from vae.system.console import command_line, counted
from vae.system.gpus import match_card
from vae.system.host import GIB
from vae.training.checkpoints.store import position_name
from vae.training.datasets import TrainingSet, cached_shards
from vae.training.distributed import Distributed
from vae.training.output.logbook import REJECTED_NAME
from vae.training.output.results_image import RESULTS_NAME
from vae.training.schedule import warmup_steps
from vae.training.stages import StageSteps, current_stage
from vae.training.state import TrainingState
from vae.training.validation.measure import Metrics

MILLION = 1e6
PROBLEMS_PAGE = "docs/monitoring.md#problems-and-remedies"
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16 with loss scaling"}


def model_line(config: ModelConfig, model: AutoencoderKL) -> str:
    """Size and shape of the autoencoder."""
    parameters = sum(p.numel() for p in model.parameters()) / MILLION
    is_other = config.decoder_channels or config.decoder
    own = f" (decoder {' '.join(map(str, config.up_channels))})" if is_other else ""
    return (
        f"{parameters:.1f} M parameters, channels {' '.join(map(str, config.channels))}{own}, "
        f"{config.z_channels} latent channels, {model.downsampling}x downsampling"
    )


def data_line(config: DataConfig, training: int, validation: int) -> str:
    """Numbers of training and validation images."""
    shown = f"{validation} for validation" if validation else "none for validation"
    return f"{training} images of {public_text(config.data_path)}, {shown}"


def crops_text(crop: str, image_size: int, buckets: Buckets | None) -> str:
    """The size of the training crops, or their shapes as width x height, with the share of images of each."""
    if buckets is None:
        return f"{image_size} px {crop} crops"
    shares = np.bincount(buckets.codes, minlength=len(buckets.shapes)) / max(1, len(buckets.codes))
    shapes = [f"{w}x{h} {share:.0%}" for (h, w), share in zip(buckets.shapes, shares, strict=True)]
    return f"{image_size} px {crop} crops of {counted(len(shapes), 'shape')} ({', '.join(shapes)})"


def loss_line(terms: LossTerms, loss: LossConfig) -> str:
    """The weighted terms of the loss."""
    parts = [f"{term.weight:g} {term.label}" for term in terms.all]
    if loss.adversarial_weight:
        parts.append(
            f"{loss.adversarial_weight:g} adversarial from step {loss.disc_start + loss.disc_warmup}"
        )
    (noise,), (mask,) = loss.decoder_noise, loss.latent_mask  # those of the stage
    changes = [f"decoder noise up to {noise:g} std"] * (noise > 0) + [f"{mask:.0%} masked"] * (mask > 0)
    return "; ".join([" + ".join(parts), *changes])


def late_discriminator_note(loss: LossConfig, step: int, last_step: int) -> str | None:
    """A note if the adversarial loss begins after `last_step`, the end of a run that is at `step`."""
    first = loss.disc_start + loss.disc_warmup
    if not loss.adversarial_weight or first < last_step or step >= last_step:
        return None
    middle = (step + last_step) // 2 - loss.disc_warmup
    remedy = f"--disc_start {middle} begins it in the middle" if middle >= 0 else "lower --disc_warmup"
    return (
        f"note: this run ends at step {last_step}, before the adversarial loss begins (step {first}): "
        f"{remedy}, more epochs reach it"
    )


def device_line(dist: Distributed, speed: SpeedConfig, dtype: torch.dtype, compiled: bool) -> str:
    """The device, the number of processes, the precision and the speed settings in use."""
    device = dist.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = match_card(properties.name, properties.total_memory / GIB)
        name = properties.name
        if known is None or not known.settings:
            name += ", no profile: settings come from its memory"
    else:
        name = counted(torch.get_num_threads(), "thread")
    extras = ["TF32"] if speed.enable_tf32 and device.type == "cuda" else []
    extras += ["channels_last"] * speed.channels_last + ["compiled"] * compiled
    world = f", {dist.world_size} processes" if dist.world_size > 1 else ""
    return f"{device.type} ({name}){world}, " + ", ".join([DTYPE_NAMES[dtype], *extras])


def busy_line(device: torch.device, threads: int) -> str | None:
    """A note if other programs keep all cores busy, for a run on the CPU; None on Windows, which has no load.

    A load average counts the processes of the whole machine, so it is compared with all of its cores, also
    in a container that may use fewer.
    """
    if device.type != "cpu" or not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return None
    fewer = ", or set OMP_NUM_THREADS=1, which suffers least" if threads > 1 else ""
    return (
        f"note: the load average is {load:.1f} on {cores} cores, so other programs slow this run down: "
        f"wait for them{fewer}"
    )


def warm_start_warning(model: ModelConfig) -> str | None:
    """A warning if the widths or norm groups are too narrow for the linear codec of --init warm."""
    if model.init != "warm" or model.init_from:
        return None
    fewer = [
        replace(model, norm_groups=groups)
        for groups in range(1, model.norm_groups)
        if all(width % groups == 0 for width in (*model.channels, *model.up_channels))
    ]
    if not _norms_fit(model):
        better = [f"--norm_groups {other.norm_groups}" for other in fewer if _norms_fit(other)]
        width = min(model.up_channels[0], model.channels[-1])
        channels = counted(width // model.norm_groups, "channel")
        return (
            f"--norm_groups {model.norm_groups} leaves {channels} per group at width {width}, too few for "
            "the warm start: it begins several dB below the bicubic baseline: use "
            f"{better[-1] if better else 'wider --channels'}"
        )
    distinct = distinct_latents(model)
    wanted = min(model.z_channels, IMAGE_CHANNELS * downsampling(model) ** 2)
    if distinct >= wanted:
        return None
    better = [f"--norm_groups {other.norm_groups}, " for other in fewer if distinct_latents(other) >= wanted]
    return (
        f"--z_channels {model.z_channels}: with --channels {' '.join(map(str, model.channels))} and "
        f"--norm_groups {model.norm_groups}, the warm start fills {distinct} latent channels and repeats "
        f"them in the others: use {better[-1] if better else ''}wider --channels or --z_channels {distinct}"
    )


def _norms_fit(model: ModelConfig) -> bool:
    """Whether the norms before the last convolutions have channels for the carriers."""
    ends = (model.up_channels[0], model.channels[-1])
    return all(carriers_per_group(width, model.norm_groups) for width in ends)


def cache_line(data: DataConfig) -> str | None:
    """Where shards are kept, or that they are read in place; None for a folder of images."""
    paths = [path for path in (*dataset_paths(data.data_path), data.val_path) if path and is_dataset(path)]
    if not paths:
        return None
    if data.cache_dir is None and not any(map(has_remote_shards, paths)):
        return "cache   none, shards are read in place (from a shared disk, --cache_dir keeps them here)"
    return f"cache   at most {data.cache_gib:g} GiB of shards in {data.cache_dir or default_folder()}"


def cache_warning(data: DataConfig, training_set: TrainingSet, dist: Distributed) -> str | None:
    """A warning if the shards that the streams of this machine read at once do not fit into the cache."""
    order, sizes = training_set.order, cached_shards(training_set.images, data)
    if not sizes or not isinstance(order, StreamOrder | MixtureOrder):
        return None
    mean, total = sum(size.mean() for size in sizes), sum(size.sum() for size in sizes)

    def needed_gib(streams: int, window: int) -> float:
        here = min(streams, dist.local_world_size * streams_of_process(streams, dist.world_size))
        return float(min(total, shards_at_once(here, window) * mean)) / GIB

    streams, window = order.num_streams, order.shuffle_shards // order.num_streams
    needed = needed_gib(streams, window)
    if needed <= data.cache_gib:
        return None
    counts = [n for n in range(dist.world_size, streams, dist.world_size) if streams % n == 0]
    smaller = [*((n, 1) for n in counts), *((streams, shards) for shards in range(1, window))]
    fitting = [pair for pair in smaller if needed_gib(*pair) <= data.cache_gib]
    remedy = ""
    if fitting:
        count, shards = fitting[-1]
        fewer = f"--data_streams {count} " if count < streams else ""
        remedy = f", or start a new run with {fewer}--shuffle_shards {count * shards}"
    return (
        f"--cache_gib {data.cache_gib:g}: --shuffle_shards {order.shuffle_shards} needs about {needed:.3g} "
        "GiB of shards at once on this machine, so many images will be read one by one over the network: use "
        f"--cache_gib {math.ceil(needed)}{remedy}"
    )


def steps_line(steps: StageSteps, optim: OptimConfig, peak: float) -> str:
    """Number of steps, epochs and the learning-rate schedule of a stage."""
    warm_up = warmup_steps(optim.warmup_epochs, steps.per_epoch, steps.total)
    first, last = steps.first_epoch + 1, steps.first_epoch + steps.num_epochs
    return (
        f"{steps.total} of {steps.images} images: epochs {first} to {last}, {steps.per_epoch} steps each; "
        f"{warm_up} of warm-up, then {optim.lr_schedule} from {peak:.3g}"
    )


def progress_line(state: TrainingState, steps: StageSteps) -> str:
    """Epochs with the tenths of an unfinished one, steps and images. `steps` are those of the last stage."""
    position, epochs = state.position, counted(state.position.epoch, "epoch")
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
    remedy: str,
) -> list[str]:
    """Best and last metrics beside the baselines, and the files that were written.

    `remedy`: what helps if PSNR has fallen in the last stage.
    """
    factor = state.autoencoder.downsampling
    lines = _metrics_lines(config, state, baselines, factor)
    if "psnr" in state.last_validation and "bicubic" in baselines:
        bicubic = f"{factor}x bicubic", baselines["bicubic"]["psnr"]
        begun = state.position.step > config.loss.disc_start + config.loss.disc_warmup
        adversarial = config.loss.adversarial_weight > 0 and begun
        psnr, start = state.last_validation["psnr"], state.history.start_psnr
        lines.append(verdict_line(psnr, bicubic, start, remedy, adversarial))
    if state.most_rejected:
        lines.append(f"skipped {counted(state.most_rejected, 'image')}: {folder / REJECTED_NAME}")
    shown = f"scaling {constants.scaling:.4f}, shift {constants.shift:.4f}"
    if config.model.latent_norm:
        shown = "latent statistics in the file"
    lines.append(f"VAE     {folder / 'vae'} ({shown})")
    if any((folder / "samples").glob("*.png")):
        columns = f"input, reconstruction, error x8, {factor}x bicubic"
        lines.append(f"samples {folder / 'samples'} ({columns})")
    if (folder / RESULTS_NAME).is_file():
        lines.append(f"curves  {folder / RESULTS_NAME}")
    return lines


def _metrics_lines(
    config: Config, state: TrainingState, baselines: dict[str, Metrics], factor: int
) -> list[str]:
    best, last = state.history.best, state.last_validation
    measured = {}
    if best.get("image_size") == last.get("image_size", best.get("image_size")) and "psnr" in best:
        name = "start" if state.history.best_is_start else f"epoch {int(best['epoch'])}"
        measured[f"{name} (best)"] = best
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
