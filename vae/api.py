"""The Python API: load a VAE, encode and decode images, train, evaluate and export. See docs/api.md.

Shapes: B images of C channels and H x W pixels; Z latent channels; h = ceil(H / f) and w = ceil(W / f), with
f the downsampling factor of the VAE (8 for the default network).

Functions that train, evaluate or export import their packages when they are called, which takes seconds.
"""

import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps

from vae.config.flags import trainer_options
from vae.config.trained_vae_flags import evaluate_config, export_config
from vae.device import DTYPES, pick_device
from vae.images import channels as image_channels
from vae.images.color import to_srgb
from vae.images.decoding import backdrop_of, decode_image
from vae.images.formats import BadImageError
from vae.images.metadata import profile_of
from vae.images.pixels import to_float, to_uint8
from vae.inference.codec import decode_latents, encode_images
from vae.interop import vae_files
from vae.interop.vae_files import LoadedVae
from vae.interop.vae_path import METRICS_NAME
from vae.model.activation_scale import UNKNOWN, scale_activations
from vae.ops.kernel_check import choose_kernels
from vae.ops.noise import keyed_normal
from vae.system.errors import DataError, UserError
from vae.system.files import expand_home, read_json_lines

if TYPE_CHECKING:
    from vae.evaluation.results import Results

PathLike = str | os.PathLike[str]
# Scaled latents have a standard deviation of about 1, unscaled ones 1 / scaling: 2.8 (FLUX.1) to 7.7 (SDXL).
MAX_TOLD_SCALING, MAX_SCALED_STD = 0.4, 1.3
MAX_VALUE = 4.0  # of float images: a reconstruction may exceed [-1, 1], values of 0 to 255 are a mistake
ImageLike = PathLike | Image.Image | np.ndarray | torch.Tensor


@dataclass(frozen=True)
class TrainingResult:
    """The files of a training run."""

    output_dir: Path
    vae: Path  # diffusers folder with the EMA weights; `load_vae` reads it
    is_complete: bool  # False: a signal stopped the run after it saved a checkpoint; resume to finish it
    records: list[dict[str, Any]]  # every record of metrics.jsonl

    @property
    def validation(self) -> dict[str, Any]:
        """The last validation record: loss, psnr in dB, ssim, lpips if it was measured; {} without one."""
        return next((r for r in reversed(self.records) if r["kind"] == "validation"), {})


def load_vae(path: PathLike, *, weights: str = "ema", device: str = "auto") -> LoadedVae:
    """Load a VAE from a checkpoint, a diffusers folder or a .safetensors file, and move it to `device`.

    `weights` selects "ema" or "raw" weights of a checkpoint. `device` is "auto", "cuda" or "cpu". Raises
    UserError if the file is not a VAE or the device is missing.
    """
    _check("weights", weights, ("ema", "raw"))
    _check("device", device, ("auto", "cuda", "cpu"))
    target = pick_device(device)
    vae = vae_files.load_vae(_path(path, "load_vae"), flag="load_vae", weights=weights)
    vae.autoencoder.to(target).to(memory_format=torch.channels_last)
    return vae


def load_images(
    images: ImageLike | Sequence[ImageLike],
    *,
    background: str = "white",
    device: str = "cpu",
    channels: int = 3,
) -> torch.Tensor:
    """Convert one image or several images of the same size to fp32 (B, C, H, W) in [-1, 1].

    Accepts image files, PIL images, uint8 arrays (H, W, C) or (B, H, W, C), uint8 tensors (C, H, W) or
    (B, C, H, W), and float tensors in [-1, 1], which stay as they are. Image files and PIL images are rotated
    by EXIF, converted to sRGB, and composited over `background`. With 4 channels they keep alpha, and with 1
    they become grey. Raises DataError for an unusable image.
    """
    if isinstance(images, str | os.PathLike | Image.Image | np.ndarray | torch.Tensor):
        images = [images]
    batches = [_to_batch(image, background, channels) for image in images]
    if not batches:
        raise DataError("load_images needs at least one image")
    sizes = sorted({f"{batch.shape[3]}x{batch.shape[2]}" for batch in batches})
    if len(sizes) > 1:
        raise DataError(f"the images have different sizes ({', '.join(sizes)}): load them one at a time")
    return torch.cat(batches).to(device)


def to_pil(images: torch.Tensor) -> list[Image.Image]:
    """Convert images (B, C, H, W) or (C, H, W) in about [-1, 1] to 8-bit PIL images."""
    batch = to_uint8(images.detach().reshape(-1, *images.shape[-3:])).permute(0, 2, 3, 1)
    return [image_channels.to_pil(image_channels.hide_colors(pixels)) for pixels in batch.cpu().numpy()]


def encode(
    vae: LoadedVae,
    images: ImageLike | Sequence[ImageLike],
    *,
    seed: int | None = None,
    dtype: str = "fp32",
    tile: int | None = None,
) -> torch.Tensor:
    """Encode images to fp32 latents (B, Z, h, w) on the VAE's device.

    The latents are the posterior's mode, or a sample that depends on `seed` if one is given. `dtype` is the
    compute dtype: "fp32", "bf16" or "fp16". `tile` is the side of tiles in px for images larger than memory;
    None processes whole images. Tiles are approximate, and need the memory of one of them.
    Diffusion models use `(latents - vae.shift_factor) * vae.scaling_factor`, or
    `vae.autoencoder.bn.normalize(latents)` if the file has statistics of channels (FLUX.2, Wan, Qwen-Image).
    """
    batch = load_images(images, channels=vae.autoencoder.config.image_channels).to(_device(vae))
    compute_dtype = _compute_dtype(vae, dtype)
    posterior = encode_images(vae.autoencoder, batch, dtype=compute_dtype, tile=tile, at_full_size=True)
    if seed is None:
        return posterior.mode()
    noise = keyed_normal(posterior.mean.shape, seed).to(posterior.mean.device)
    return posterior.sample(noise)


def decode(
    vae: LoadedVae,
    latents: torch.Tensor,
    size: Sequence[int] | None = None,
    *,
    dtype: str = "fp32",
    tile: int | None = None,
) -> torch.Tensor:
    """Decode latents (B, Z, h, w) to fp32 images (B, C, H, W) in about [-1, 1], not clamped.

    `size` is (H, W) of the encoded images; it removes the padding of sides that are not a multiple of f. A
    decoder of twice the size returns (2H, 2W).
    `dtype` and `tile` are the same as in `encode`.
    """
    channels = vae.autoencoder.config.z_channels
    if latents.ndim != 4 or latents.shape[1] != channels:
        raise DataError(
            f"latents have shape {tuple(latents.shape)}: give (B, {channels}, h, w), as encode returns them"
        )
    f = vae.autoencoder.encoder_downsampling
    if size is not None and [-(-side // f) for side in size] != list(latents.shape[2:]):
        height, width = (f"{(n - 1) * f + 1} to {n * f}" for n in latents.shape[2:])
        raise DataError(f"size={tuple(size)} does not match the latents: give (H, W), H {height}, W {width}")
    _warn_of_scaled_latents(vae, latents)
    latents = latents.to(_device(vae))
    scale = vae.autoencoder.config.up_scale
    size = None if size is None else [side * scale for side in size]
    return decode_latents(vae.autoencoder, latents, size, dtype=_compute_dtype(vae, dtype), tile=tile)


def reconstruct(
    vae: LoadedVae, images: ImageLike | Sequence[ImageLike], *, dtype: str = "fp32", tile: int | None = None
) -> torch.Tensor:
    """Encode and decode images: fp32 (B, C, H, W) in about [-1, 1], not clamped. See `encode`.

    If the decoder has twice the size, the encoder reads the images at half their size.
    """
    batch = load_images(images, channels=vae.autoencoder.config.image_channels).to(_device(vae))
    compute_dtype = _compute_dtype(vae, dtype)
    latents = encode_images(vae.autoencoder, batch, dtype=compute_dtype, tile=tile).mode()
    return decode_latents(vae.autoencoder, latents, batch.shape[2:], dtype=compute_dtype, tile=tile)


def train(**options: Any) -> TrainingResult:
    """Train, or resume training, with options named as the flags of train_vae.py (docs/flags.md).

    `train(data_path="photos", profile="demo")` equals `train_vae.py --data_path photos --profile demo`.
    Raises UserError for invalid options; DataError and NonFiniteError are subclasses of it.
    """
    from vae.training.early_checks import check_command
    from vae.training.run import train_checked

    command = check_command(trainer_options(_given(options)))
    if command.value("find_lr"):
        raise UserError("find_lr=True trains nothing: use train_vae.py --find_lr")
    code = train_checked(command)
    output_dir = command.output_dir
    records = list(read_json_lines(output_dir / METRICS_NAME))
    return TrainingResult(output_dir, output_dir / "vae", code == 0, records)


def evaluate(
    vae: PathLike | Sequence[PathLike], data_path: PathLike, output_dir: PathLike, **options: Any
) -> "Results":
    """Measure one or several VAE files on a folder of images, write report.html, and return all results.

    `options` are named as the flags of evaluate_vae.py (docs/evaluate.md). Raises UserError.
    """
    from vae.evaluation import compare
    from vae.evaluation.early_checks import check_command
    from vae.prepare.hub_dataset import with_local_data

    values = {"vae": vae, "data_path": data_path, "output_dir": output_dir, **options}
    config = evaluate_config(_given(values))
    check_command(config)
    return compare.compare(with_local_data(config))


def export(vae: PathLike | Sequence[PathLike], output: PathLike, **options: Any) -> Path:
    """Write a VAE file for other programs and return its path; several VAEs are averaged.

    `options` are named as the flags of export_vae.py (docs/export.md). Raises UserError.
    """
    from vae.interop import exporting

    config = export_config(_given({"vae": vae, "output": output, **options}))
    exporting.export(config)
    return Path(config.output)


def _warn_of_scaled_latents(vae: LoadedVae, latents: torch.Tensor) -> None:
    """Warn of latents that are as wide as those of diffusion models, if those of the VAE are wider."""
    scaling = vae.scaling_factor
    if scaling is None or scaling > MAX_TOLD_SCALING or latents.numel() < 2:
        return
    if 0 < (std := latents.float().std().item()) < MAX_SCALED_STD:
        warnings.warn(
            f"the latents have a standard deviation of {std:.2g}, those of this VAE about {1 / scaling:.2g}: "
            "scaled ones are decoded as latents / vae.scaling_factor + vae.shift_factor",
            stacklevel=3,
        )


def _device(vae: LoadedVae) -> torch.device:
    return next(vae.autoencoder.parameters()).device


def _compute_dtype(vae: LoadedVae, name: str) -> torch.dtype:
    """The dtype with this name; its first use on a card tests the Triton kernels."""
    _check("dtype", name, DTYPES)
    choose_kernels("auto", _device(vae), [DTYPES[name]])
    scale_activations(vae.autoencoder, UNKNOWN if name == "fp16" else 1.0)
    return DTYPES[name]


def _check(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise UserError(f'{option}="{value}" is unknown: use one of {", ".join(known)}')


def _to_batch(image: ImageLike, background: str, channels: int) -> torch.Tensor:
    """One image of any accepted kind as fp32 (B, C, H, W) in [-1, 1]."""
    if not isinstance(image, torch.Tensor):
        pixels = image if isinstance(image, np.ndarray) else _pixels(image, background, channels)
        image = torch.from_numpy(np.array(pixels))
        image = image.movedim(-1, -3) if image.ndim > 2 else image
    batch = image if image.ndim == 4 else image[None]
    is_float = batch.is_floating_point()
    if batch.ndim != 4 or batch.shape[1] != channels or not (is_float or batch.dtype == torch.uint8):
        raise DataError(
            f"images have shape {tuple(image.shape)} and dtype {image.dtype}: give uint8, or floats in "
            f"[-1, 1], (B, {channels}, H, W), or arrays (B, H, W, {channels})"
        )
    if not is_float:
        return to_float(batch)
    largest = batch.abs().max().item() if batch.numel() else 0.0
    if not largest <= MAX_VALUE:  # or NaN
        raise DataError(f"images have float values up to {largest:g}: give floats in [-1, 1], or uint8")
    if largest <= 1 and batch.min() >= 0 and batch.min() < 0.5 < largest:
        warnings.warn(
            "the float images have no value below 0: give those with values from 0 to 1 as images * 2 - 1",
            stacklevel=4,
        )
    return batch.float()


def _pixels(image: PathLike | Image.Image, background: str, channels: int) -> np.ndarray:
    try:
        if not isinstance(image, Image.Image):
            return decode_image(_path(image, "load_images"), background=background, channels=channels)
        profile = profile_of(image, image.format or "", b"")
        backdrop = backdrop_of(background, channels)
        pixels = to_srgb(ImageOps.exif_transpose(image), profile, backdrop, set())
        return image_channels.with_channels(pixels, channels)
    except BadImageError as error:
        name = f"a PIL image of mode {image.mode}" if isinstance(image, Image.Image) else os.fspath(image)
        raise DataError(f"{name}: {error}") from None


def _path(path: PathLike, function: str) -> Path:
    return Path(expand_home(os.fspath(path), function))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a call gives: None means "not given"."""
    return {name: value for name, value in options.items() if value is not None}
