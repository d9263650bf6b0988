"""Measure the reconstructions of every image at one size, by a VAE, bicubic, JPEG or WebP.

Shapes: B images of C channels and H x W px, Z latent channels, h x w latent pixels.
"""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from vae.evaluation.image_set import ImageSet
from vae.evaluation.latents import LatentMeter
from vae.evaluation.metrics import (
    MS_SSIM_MIN_SIDE,
    SSIM_WINDOW,
    ReconstructionFid,
    alpha_psnr,
    bicubic_baseline,
    color_psnr,
    ms_ssim,
    ssim,
)
from vae.evaluation.results import PER_IMAGE, SizeResult, mean_of
from vae.images.composites import as_rgb, per_image
from vae.images.pixels import MAX_PSNR_DB, as_float, as_uint8, to_float, to_uint8
from vae.inference.codec import crop_back, decode_latents, encode_images, pad_to_multiple
from vae.losses.perceptual import PerceptualLoss
from vae.model.autoencoder import AutoencoderKL, Posterior
from vae.ops.noise import keyed_normal
from vae.progress import Progress

# (images, indices) -> reconstructions: uint8 images (B, C, H, W) and their indices in the set to one
# (C, H, W) per image, uint8 or floats in about [-1, 1], or None if an image cannot be reconstructed
Reconstruct = Callable[[torch.Tensor, range], list[torch.Tensor | None]]
_Result = TypeVar("_Result")

# Pillow's names and options; both store colour at half resolution
CODECS: dict[str, dict[str, Any]] = {"JPEG": {"optimize": True}, "WebP": {"method": 4}}
QUALITIES = (1, 95)  # above 95, Pillow's JPEG files only grow


def bits_per_pixel(channels: int, downsampling: int) -> float:
    """Bits per image pixel of a latent stored in 8 bit per value."""
    return 8 * channels / downsampling**2


def latent_bytes(height: int, width: int, channels: int, downsampling: int) -> int:
    """Bytes of the latent of an H x W image, stored in 8 bit per value."""
    return channels * -(-height // downsampling) * -(-width // downsampling)


def through_codec(image: torch.Tensor, codec: str, budget: int) -> torch.Tensor | None:
    """The image at the best quality whose file has at most `budget` bytes; None if there is none."""
    pil_image = to_pil_image(image)
    low, high = QUALITIES
    best = None
    while low <= high:  # a better quality needs more bytes
        middle = (low + high) // 2
        content = _encode(pil_image, codec, middle)
        if len(content) <= budget:
            best = content
            low = middle + 1
        else:
            high = middle - 1
    return None if best is None else pil_to_tensor(Image.open(io.BytesIO(best)).convert(pil_image.mode))


def _encode(pil_image: Image.Image, codec: str, quality: int) -> bytes:
    buffer = io.BytesIO()
    pil_image.save(buffer, format=codec, quality=quality, **CODECS[codec])
    return buffer.getvalue()


@dataclass(frozen=True)
class Metrics:
    """The metrics of a comparison, and the device that computes them."""

    device: torch.device
    perceptual: PerceptualLoss | None
    rfid: ReconstructionFid | None

    def of_image(self, recon: torch.Tensor, image: torch.Tensor) -> dict[str, float | None]:
        """Every metric of PER_IMAGE for one image and its reconstruction, (C, H, W).

        A value is None if the image is too small for that metric, or has no alpha.
        """
        recon = as_float(recon[None].to(self.device)).clamp(-1, 1)
        image = to_float(image[None].to(self.device))
        side = min(image.shape[2:])
        lpips = self.perceptual if self.perceptual and side >= self.perceptual.smallest_side else None
        x, y = as_rgb(recon), as_rgb(image)
        values = {
            "psnr": color_psnr(recon, image, MAX_PSNR_DB),
            "psnr_alpha": alpha_psnr(recon, image, MAX_PSNR_DB),
            "ssim": ssim(x, y) if side >= SSIM_WINDOW else None,
            "ms_ssim": ms_ssim(x, y) if side >= MS_SSIM_MIN_SIDE else None,
            "lpips": lpips(to_float(to_uint8(x)), y) if lpips else None,
        }
        return {name: None if v is None else per_image(v, 1).item() for name, v in values.items()}


class VaeCodec:
    """A VAE that reconstructs images, and records the time and the peak memory of encoder and decoder."""

    def __init__(self, model: AutoencoderKL, dtype: torch.dtype, sample_seed: int | None):
        """`sample_seed` and the image's index are the key of decoded samples; None decodes the mode."""
        self.model = model
        self.dtype = dtype
        self.sample_seed = sample_seed
        self.device = next(model.parameters()).device
        self._warm_shapes: set[torch.Size] = set()
        self.start()

    def start(self) -> None:
        """Reset times, peaks and latents, before another size is measured."""
        self.latents = LatentMeter(self.model.config.z_channels)
        self._seconds = {"encode": 0.0, "decode": 0.0}
        self._peaks: dict[str, int | None] = {"encode": None, "decode": None}
        self._images = 0

    def __call__(self, images: torch.Tensor, indices: range) -> list[torch.Tensor | None]:
        """Reconstructions of (B, C, H, W), as floats; None if the network returned NaN or infinity."""
        images = to_float(images.to(self.device))
        # a GPU selects kernels in the first call of each shape; on a CPU, other shapes would cost double
        shape = images.shape if self.device.type == "cuda" else torch.Size()
        if shape not in self._warm_shapes:
            self._decode(self._encode(images).mode(), images.shape[2:])
            self._warm_shapes.add(shape)
        posterior = self._timed("encode", lambda: self._encode(images))
        latents = posterior.mode()
        if self.sample_seed is not None:
            noise = [keyed_normal(latents.shape[1:], self.sample_seed, index) for index in indices]
            latents = posterior.sample(torch.stack(noise).to(latents.device))
        recon = self._timed("decode", lambda: self._decode(latents, images.shape[2:]))
        self._images += len(images)
        if torch.isfinite(posterior.mean).all():
            self.latents.add(posterior)
        return [image if torch.isfinite(image).all() else None for image in recon]

    def add_speed(self, result: SizeResult) -> None:
        """Store images per second and peak bytes since `start` in `result`."""
        result.encode_images_per_s = self._images / self._seconds["encode"]
        result.decode_images_per_s = self._images / self._seconds["decode"]
        result.encode_peak_bytes = self._peaks["encode"]
        result.decode_peak_bytes = self._peaks["decode"]

    def latents_of(self, images: torch.Tensor) -> torch.Tensor:
        """The posterior's mode (B, Z, h, w) of images (B, C, H, W)."""
        return self._encode(to_float(images.to(self.device))).mode()

    def _encode(self, images: torch.Tensor) -> Posterior:
        return encode_images(self.model, images, dtype=self.dtype)

    def _decode(self, latents: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        return decode_latents(self.model, latents, size, dtype=self.dtype)

    def _timed(self, part: str, work: Callable[[], _Result]) -> _Result:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        result = work()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            self._peaks[part] = max(peak, self._peaks[part] or 0)
        self._seconds[part] += time.perf_counter() - begin
        return result


def bicubic_reconstruction(factor: int) -> Reconstruct:
    """The bicubic baseline for a VAE with the downsampling `factor`; images are padded as for the VAE."""

    def reconstruct(images: torch.Tensor, _: range) -> list[torch.Tensor | None]:
        padded = pad_to_multiple(to_float(images), factor)
        return list(to_uint8(crop_back(bicubic_baseline(padded, factor), images.shape[2:])))

    return reconstruct


def classic_codec(name: str, channels: int, downsampling: int) -> Reconstruct:
    """JPEG or WebP with at most as many bytes as a latent of `channels` in 8 bit."""

    def reconstruct(images: torch.Tensor, _: range) -> list[torch.Tensor | None]:
        budget = latent_bytes(images.shape[2], images.shape[3], channels, downsampling)
        return [through_codec(image.cpu(), name, budget) for image in images]

    return reconstruct


def measure(
    reconstruct: Reconstruct, image_set: ImageSet, size: int, batch_size: int, metrics: Metrics, title: str
) -> SizeResult:
    """Every metric of every image, and their means, at one size; `title` labels the progress bar.

    A mean is None if any image has no value, so that all means are over the same images.
    """
    per_image: dict[str, dict[str, float | None]] = {}
    with Progress(title, len(image_set.names), "image", keep=False) as bar:
        for names, images in image_set.batches(size, batch_size):
            first = len(per_image)
            recons = reconstruct(images, range(first, first + len(names)))
            for name, recon, image in zip(names, recons, images, strict=True):
                if recon is None:
                    per_image[name] = dict.fromkeys(PER_IMAGE)
                    continue
                per_image[name] = metrics.of_image(recon, image)
                if metrics.rfid is not None:
                    pair = (as_float(v[None].to(metrics.device)) for v in (image, recon))
                    metrics.rfid.add(*(as_uint8(as_rgb(v)) for v in pair))
            bar.update(len(names))
    means = {metric: mean_of([row[metric] for row in per_image.values()]) for metric in PER_IMAGE}
    distance = metrics.rfid.take() if metrics.rfid is not None else None
    means["rfid"] = distance if means["psnr"] is not None else None  # all images were reconstructed
    return SizeResult(size, means, per_image)
