"""One export: read, average, measure, fold, convert, write."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from vae.config.errors import DataError, UserError
from vae.config.export_flags import PUBLISHED_SCALING, ExportConfig
from vae.data.folder import list_images
from vae.data.loading import load_validation
from vae.data.manifest import image_root, is_manifest, train_and_val
from vae.device import pick_device
from vae.files import nearest_existing
from vae.interop.averaging import average, recorded_score, softmax_shares
from vae.interop.compvis_names import to_compvis
from vae.interop.diffusers_folder import WEIGHTS_NAME, diffusers_config, save_diffusers_folder
from vae.interop.folding import fold, folding_for, with_quant_conv
from vae.interop.half_precision import LargestActivation, largest_activation
from vae.interop.latent_statistics import (
    LatentStatistics,
    LatentSums,
    add_patches,
    is_unmeasured,
    set_latent_norm,
)
from vae.interop.safetensors_file import stored_weights, write_safetensors
from vae.interop.vae_files import CONFIG_KEY, LoadedVae, load_vae
from vae.model.autoencoder import AutoencoderKL
from vae.pixels import to_float

DEFAULT_IMAGE_SIZE = 256  # px
FP16_IMAGES = 32  # that fp16 is tried on: decoding takes most of the time
Say = Callable[[str], None]


def export(config: ExportConfig, say: Say = print) -> None:
    """Write what `config` asks for and tell `say` what was found; a UserError leaves nothing written."""
    output = Path(config.output)
    _check_output(output, config)
    loaded = _average(config, say)
    model, scaling = loaded.autoencoder, _scaling_of(loaded, config)
    if config.add_quant_conv:
        model = with_quant_conv(model)
    crops = _Crops(config, loaded) if config.data_path else None
    device = pick_device(config.device)
    model.to(device)
    statistics, largest = None, None
    if crops:
        statistics = _measure(model, crops, device, say)
        if config.fold_scaling:
            scaling = _fold(model, statistics, config, say)
        scaling = scaling or (statistics.scaling, statistics.shift)
        images = (batch.to(device) for batch in crops.batches(FP16_IMAGES))
        largest = largest_activation(model, images)
        say(largest.line())
    elif config.dtype == "fp16":
        say("WARNING: whether fp16 holds the activations was not tried: --data_path gives images for it")
    if scaling is None and model.bn is None and config.format == "diffusers":
        raise _scaling_is_missing(config.vae[0])
    _write(output, model, config, loaded, scaling, statistics, largest)
    known = f", scaling {scaling[0]:.5g}, shift {scaling[1]:.5g}" if scaling and model.bn is None else ""
    say(f"written: {output} ({config.format}, {config.dtype}{known})")


def _scaling_is_missing(path: str) -> UserError:
    published = "; ".join(f"{name} {a:g} {b:g}" for name, (a, b) in PUBLISHED_SCALING.items())
    return UserError(
        f"--vae {path} does not say the scaling of its latents, and diffusers needs it: give --data_path to "
        f"measure it, or --scaling_factor and --shift_factor ({published})"
    )


def _check_output(output: Path, config: ExportConfig) -> None:
    if config.format == "single" and output.is_dir():
        raise UserError(f"--output {output} is a folder: name a file, or use --format diffusers")
    if config.format == "diffusers" and output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file: name a folder, or use --format single")
    taken = [output] if config.format == "single" else [output / WEIGHTS_NAME, output / "config.json"]
    if any(path.exists() for path in taken) and not config.overwrite:
        raise UserError(f"--output {output} exists: name another, or add --overwrite to replace it")
    folder = nearest_existing(output.absolute().parent)
    if not folder.is_dir():
        raise UserError(f"--output {output} lies in {folder}, which is a file: name another")
    if not os.access(folder, os.W_OK):  # said before the work; other reasons are met when writing
        raise UserError(f"--output {output}: nothing may be written into {folder}: mend that or name another")


def _average(config: ExportConfig, say: Say) -> LoadedVae:
    """The VAE that --vae names, or the mean of those that it names."""
    first = load_vae(Path(config.vae[0]), weights=config.weights)
    if len(config.vae) == 1:
        return first
    others = [load_vae(Path(path), weights=config.weights) for path in config.vae[1:]]
    everyone = [first, *others]
    for path, other in zip(config.vae[1:], others, strict=True):
        if other.autoencoder.config != first.autoencoder.config:
            raise UserError(f"--vae {path} has another shape than {config.vae[0]}: they cannot be averaged")
    shares = [1 / len(everyone)] * len(everyone)
    if config.average_by == "score":
        scores = config.scores or [_score(path, vae) for path, vae in zip(config.vae, everyone, strict=True)]
        shares = softmax_shares(scores, config.temperature)
    for path, share in zip(config.vae, shares, strict=True):
        say(f"averaged: {share:.1%} of {path}")
    first.autoencoder.load_state_dict(average([vae.autoencoder.state_dict() for vae in everyone], shares))
    return first


def _score(path: str, vae: LoadedVae) -> float:
    if vae.file.step is None:
        raise UserError(
            f"--average_by score: {path} is no checkpoint of a run: give --scores, one for each --vae"
        )
    return recorded_score(Path(path), vae.file.step)


def _scaling_of(loaded: LoadedVae, config: ExportConfig) -> tuple[float, float] | None:
    if config.fold_scaling and loaded.autoencoder.bn is not None:
        raise UserError(
            "--fold_scaling: this VAE carries the statistics of its latents in its file: leave it out"
        )
    if config.scaling_factor is not None:
        return config.scaling_factor, config.shift_factor or 0.0
    if loaded.scaling_factor is not None:
        return loaded.scaling_factor, loaded.shift_factor
    return None


class _Crops:
    """Centre crops of the images at --data_path, one by one."""

    def __init__(self, config: ExportConfig, loaded: LoadedVae):
        path = config.data_path
        if is_manifest(path):
            names = train_and_val(path, fold=None, val_split=0.0, seed=0, val_split_given=False)[0]
        else:
            names = list_images(path)
        stride = max(1, len(names) // config.num_images) if config.num_images else 1
        self.root = image_root(path)
        self.names = names[::stride][: config.num_images or None]
        factor = loaded.autoencoder.downsampling
        size = config.image_size or loaded.file.sample_size or DEFAULT_IMAGE_SIZE
        if size % factor:
            raise UserError(
                f"--image_size {size} is not a multiple of {factor}: try {-(-size // factor) * factor}"
            )
        self.image_size = size

    def batches(self, limit: int | None = None) -> Iterator[torch.Tensor]:
        """fp32 (1, 3, S, S) in [-1, 1]; DataError where no image can be used."""
        found, rejected = 0, []
        for batch in load_validation(self.root, self.names, image_size=self.image_size, batch_size=1):
            rejected += batch.rejected
            for image in batch.images:
                found += 1
                yield to_float(image[None])
            if found == limit:
                return
        if not found:
            reason = f": {rejected[0]}" if rejected else ""
            raise DataError(
                f"--data_path {self.root}: none of {len(self.names)} images gives a crop of "
                f"{self.image_size} px{reason}; lower --image_size or name other images"
            )


@torch.no_grad()
def _measure(model: AutoencoderKL, crops: _Crops, device: torch.device, say: Say) -> LatentStatistics:
    """Statistics of the latents; a latent norm that was never measured takes them."""
    sums, patches, num_images = LatentSums(), LatentSums(), 0
    for images in tqdm(crops.batches(), "latents", len(crops.names), unit="crop", disable=None):
        posterior = model.encode(images.to(device))
        sums.add(posterior.mean, posterior.logvar)
        num_images += 1
        if model.bn is not None:
            add_patches(patches, posterior)
    statistics = sums.statistics()
    say(f"latents of {num_images} crops of {crops.image_size} px: mean {statistics.shift:.5g}, "
        f"spread {1 / statistics.scaling:.5g}")  # fmt: skip
    say("  mean of each channel:   " + " ".join(f"{value:.3g}" for value in statistics.mean.tolist()))
    say("  spread of each channel: " + " ".join(f"{value:.3g}" for value in statistics.std.tolist()))
    if model.bn is not None and is_unmeasured(model.bn):
        set_latent_norm(model, patches.statistics())
        say("  the latent norm of the file is set to them")
    return statistics


def _fold(model, statistics: LatentStatistics, config: ExportConfig, say: Say) -> tuple[float, float]:
    """Fold into the weights; returns the constants that the VAE now suits."""
    scaling, shift = PUBLISHED_SCALING[config.fold_scaling]
    with_shift = model.quant_conv is not None
    multiply, add = folding_for(
        statistics, scaling, shift, per_channel=config.per_channel, with_shift=with_shift
    )
    fold(model, multiply.to(next(model.parameters()).device), add.to(next(model.parameters()).device))
    mean = round(((statistics.mean * multiply + add - shift) * scaling).mean().item(), 3) + 0.0  # no -0
    say(
        f"folded: scaling {scaling} and shift {shift} ({config.fold_scaling}) now give latents of spread 1 "
        f"and mean {mean:g}" + ("" if with_shift else "; a shift can be folded only with --add_quant_conv")
    )
    return scaling, shift


def _write(
    output: Path,
    model: AutoencoderKL,
    config: ExportConfig,
    loaded: LoadedVae,
    scaling: tuple[float, float] | None,
    statistics: LatentStatistics | None,
    largest: LargestActivation | None,
) -> None:
    said = loaded.file.force_upcast
    upcast = largest.is_near if largest else said if said is not None else True
    size = loaded.file.sample_size or config.image_size or DEFAULT_IMAGE_SIZE
    described = diffusers_config(model.config, size, *(scaling or (1.0, 0.0)), force_upcast=upcast)
    metadata = {}
    if statistics is not None:
        numbers = {"mean": statistics.mean.tolist(), "std": statistics.std.tolist()}
        metadata["latent_statistics"] = json.dumps(numbers)
    weights = stored_weights(model, config.dtype)
    if config.format == "diffusers":
        save_diffusers_folder(output, weights, described, metadata)
        return
    if scaling is None:
        described = {k: v for k, v in described.items() if k not in ("scaling_factor", "shift_factor")}
    weights = to_compvis(weights, quant_conv_inside=model.bn is not None)
    write_safetensors(output, weights, {**metadata, CONFIG_KEY: json.dumps(described)})
