"""Reconstructions of every image at one size, measured: by a VAE, or by a classic codec at as many bytes.

Shapes: B images of H x W px, Z latent channels, h x w latent pixels.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from vae.evaluation.codecs import latent_bytes, through_codec
from vae.evaluation.image_files import ImageSet
from vae.evaluation.latents import LatentMeter
from vae.evaluation.learned_metrics import ReconstructionFid
from vae.evaluation.metrics import MS_SSIM_LEAST_SIDE, SSIM_WINDOW, ms_ssim, psnr, ssim, to_8_bit
from vae.evaluation.results import SizeResult
from vae.evaluation.sums import MAX_PSNR_DB
from vae.inference.codec import decode_latents, encode_images
from vae.losses.perceptual import PerceptualLoss
from vae.model.autoencoder import AutoencoderKL
from vae.noise import keyed_normal
from vae.pixels import to_float

PER_IMAGE = ("psnr", "ssim", "ms_ssim", "lpips")
# uint8 (B, 3, H, W) and the indices of the images to reconstructions of each, uint8 or None: cannot be had
Reconstruct = Callable[[torch.Tensor, range], list[torch.Tensor | None]]


@dataclass(frozen=True)
class Instruments:
    """What reconstructions are measured with."""

    device: torch.device
    perceptual: PerceptualLoss | None
    rfid: ReconstructionFid | None

    def of_one(self, recon: torch.Tensor, image: torch.Tensor) -> dict[str, float | None]:
        """Every metric of one image and its reconstruction, both uint8 (3, H, W); None: too small."""
        recon, image = (to_float(values[None].to(self.device)) for values in (recon, image))
        side = min(image.shape[2:])
        lpips = self.perceptual if self.perceptual and side >= self.perceptual.smallest_side else None
        found = {
            "psnr": psnr(recon, image).clamp(max=MAX_PSNR_DB),
            "ssim": ssim(recon, image) if side >= SSIM_WINDOW else None,
            "ms_ssim": ms_ssim(recon, image) if side >= MS_SSIM_LEAST_SIDE else None,
            "lpips": lpips(recon, image) if lpips else None,
        }
        return {name: None if value is None else value.item() for name, value in found.items()}


class VaeCodec:
    """A VAE that reconstructs, with a clock and a memory gauge around encoder and decoder."""

    def __init__(self, model: AutoencoderKL, dtype: torch.dtype, sample_seed: int | None):
        """`sample_seed`: decodes samples drawn by it and the image's index; None: the posterior's mode."""
        self.model, self.dtype, self.sample_seed = model, dtype, sample_seed
        self.device = next(model.parameters()).device
        self.latents = LatentMeter()
        self.start()

    def start(self) -> None:
        """Forget times, peaks and latents: another size begins."""
        self.latents = LatentMeter()
        self._seconds = {"encode": 0.0, "decode": 0.0}
        self._peaks: dict[str, int | None] = {"encode": None, "decode": None}
        self._images = 0
        self._warm = False

    def __call__(self, images: torch.Tensor, indices: range) -> list[torch.Tensor | None]:
        """Reconstructions of uint8 (B, 3, H, W); None where the network gave NaN or infinity."""
        images = to_float(images.to(self.device))
        if not self._warm:  # kernels are chosen and memory is fetched on the first call of a shape
            self._decode(self._encode(images).mode(), images.shape[2:])
            self._warm = True
        posterior = self._timed("encode", lambda: self._encode(images))
        latents = posterior.mode()
        if self.sample_seed is not None:
            latents = posterior.sample(self._noise(latents, indices))
        recon = self._timed("decode", lambda: self._decode(latents, images.shape[2:]))
        self._images += len(images)
        if torch.isfinite(posterior.mean).all():
            self.latents.add(posterior)
        return [to_levels(one) if torch.isfinite(one).all() else None for one in recon]

    def add_speed(self, result: SizeResult) -> None:
        """Put images per second and peak bytes since `start` into `result`."""
        result.encode_images_per_s = self._images / self._seconds["encode"]
        result.decode_images_per_s = self._images / self._seconds["decode"]
        result.encode_peak_bytes = self._peaks["encode"]
        result.decode_peak_bytes = self._peaks["decode"]

    def latents_of(self, images: torch.Tensor) -> torch.Tensor:
        """The posterior's mode (B, Z, h, w) of uint8 (B, 3, H, W)."""
        return self._encode(to_float(images.to(self.device))).mode()

    def _encode(self, images: torch.Tensor):
        return encode_images(self.model, images, dtype=self.dtype)

    def _decode(self, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return decode_latents(self.model, latents, size, dtype=self.dtype)

    def _noise(self, like: torch.Tensor, indices: range) -> torch.Tensor:
        """Standard normal noise by (seed, image), whatever the batch."""
        noise = [keyed_normal(like.shape[1:], self.sample_seed, index) for index in indices]
        return torch.stack(noise).to(like.device)

    def _timed(self, part: str, work: Callable):
        on_card = self.device.type == "cuda"
        if on_card:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        result = work()
        if on_card:
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
            self._peaks[part] = max(peak, self._peaks[part] or 0)
        self._seconds[part] += time.perf_counter() - begin
        return result


def classic_codec(name: str, channels: int, downsampling: int) -> Reconstruct:
    """JPEG or WebP at the bytes of a latent of `channels` in 8 bit."""

    def reconstruct(images: torch.Tensor, _: range) -> list[torch.Tensor | None]:
        budget = latent_bytes(*images.shape[2:], channels, downsampling)
        return [through_codec(image.cpu(), name, budget) for image in images]

    return reconstruct


def measure(
    reconstruct: Reconstruct, image_set: ImageSet, size: int, batch_size: int, tools: Instruments, title: str
) -> SizeResult:
    """Every metric of every image and their means at one size; `title` stands before the progress bar.

    A mean is None as soon as one image has no value: means stay comparable, over the same images.
    """
    per_image: dict[str, dict[str, float | None]] = {}
    complete = True
    bar = tqdm(total=len(image_set.names), desc=title, unit="image", leave=False, disable=None)
    with bar:
        for names, images in image_set.batches(size, batch_size):
            first = len(per_image)
            recon = reconstruct(images, range(first, first + len(names)))
            for name, one, image in zip(names, recon, images, strict=True):
                nothing = dict.fromkeys(PER_IMAGE)
                per_image[name] = nothing if one is None else tools.of_one(one, image)
                complete = complete and one is not None
                if tools.rfid is not None and one is not None:
                    tools.rfid.add(image[None].to(tools.device), one[None].to(tools.device))
            bar.update(len(names))
    means: dict[str, float | None] = {}
    for metric in PER_IMAGE:
        values = [row[metric] for row in per_image.values()]
        means[metric] = None if None in values else math.fsum(values) / len(values)
    distance = tools.rfid.take() if tools.rfid is not None else None
    means["rfid"] = distance if complete else None
    return SizeResult(size, means, per_image)


def to_levels(image: torch.Tensor) -> torch.Tensor:
    """About [-1, 1] to uint8, clamped and rounded to the nearest level."""
    return to_8_bit(image).to(torch.uint8)
