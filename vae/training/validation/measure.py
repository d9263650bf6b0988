"""Validation of the exported weights, and of two baselines, on images that are never trained on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from vae.config.options import DataConfig
from vae.data.dataset import Batch, Images
from vae.data.exclude_list import Excluded
from vae.data.loading import load_validation
from vae.evaluation.latents import LATENTS, NOISE_SEED, NoiseMeter, channel_facts, noise_curve, noise_facts
from vae.evaluation.metrics import Sums, baseline_sums, means, reconstruction_sums
from vae.images.pixels import OFF_BY_ONE_DB, to_float
from vae.inference.codec import decode_latents, encode_images
from vae.losses.perceptual import lpips_of
from vae.model.autoencoder import AutoencoderKL
from vae.ops.noise import keyed_normal
from vae.step import Networks, network_input
from vae.system import console
from vae.training.distributed import Distributed
from vae.training.validation.slices import Slices

NOISE_IMAGES = 4  # images that are decoded with noise
NOISES = (0.1, 0.2, 0.4)  # this noise, in standard deviations of each channel
FEW_IMAGES = 32  # up to this number, starting worker processes takes longer than decoding

Metrics = dict[str, float]


@dataclass(frozen=True)
class ValidationSet:
    """The validation images of a run: the first `count` of a set, or those at `chosen` places of it."""

    images: Images
    count: int
    data: DataConfig = field(default_factory=DataConfig)
    num_workers: int = 0
    reported: set[str] = field(default_factory=set)  # unusable files that were reported
    chosen: tuple[int, ...] = ()  # if not empty, `count` indices
    label: Callable[[int], str | None] = lambda _index: None  # of an image, for slices
    excluded: Excluded = Excluded()  # noqa: RUF009 - never modified

    def spread(self, most: int) -> "ValidationSet":
        """At most `most` of the images, at equal distances."""
        count = min(most, self.count)
        return replace(self, count=count, chosen=tuple(n * self.count // count for n in range(count)))

    def record(self) -> Any:
        """What `split.json` says about the images."""
        record = self.images.record()
        used = record[: self.count] if isinstance(record, list) else {**record, "used": self.count}
        return self.excluded.without(used)

    def share(self, dist: Distributed) -> Sequence[int]:
        """The indices of this process's images."""
        indices = [index for index in self.chosen or range(self.count) if index not in self.excluded]
        return indices[dist.rank :: dist.world_size]

    def batches(
        self, image_size: int, batch_size: int, dist: Distributed, while_waiting: Callable[[], None]
    ) -> Iterator[Batch]:
        """Centre crops of this process's share: uint8 (B, 3, S, S).

        `while_waiting` is called during waits for images, and may end them with an exception.
        """
        indices = self.share(dist)
        loader = load_validation(
            self.images,
            indices,
            self.data,
            image_size=image_size,
            batch_size=batch_size,
            num_workers=self.num_workers if len(indices) > FEW_IMAGES else 0,
            while_waiting=while_waiting,
        )
        for batch in loader:
            for rejection in batch.rejected:
                if rejection.name not in self.reported:
                    self.reported.add(rejection.name)
                    console.info(f"validation image skipped: {rejection}")
            if len(batch.images):
                yield batch


def mode_reconstruction(
    model: AutoencoderKL, networks: Networks, noise: NoiseMeter | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from images (B, 3, H, W) in [-1, 1] to their reconstructions by the posterior's mode.

    `noise` gets the posteriors.
    """

    @torch.no_grad()
    def reconstruct(images: torch.Tensor) -> torch.Tensor:
        recon, mean, logvar = model(network_input(images, networks, networks.eval_dtype))
        if noise is not None:
            noise.add(mean, logvar)
        return recon

    return reconstruct


@dataclass
class ReconstructionMeter:
    """Measures reconstructions: PSNR, SSIM and, if LPIPS is part of the loss, LPIPS; also the noise."""

    model: AutoencoderKL
    networks: Networks
    slices: Slices
    channel_std: torch.Tensor | None = None  # (C,) of the latents, once there are metrics of images

    def sums(self, batches: Iterable[Batch]) -> dict[str, Sums]:
        """Sums over the images of `batches`, on their device; those of each slice by its label."""
        each_psnr: list[float] = []
        indices: list[int] = []
        noise = NoiseMeter(self.model.config.z_channels)

        def images() -> Iterator[torch.Tensor]:
            for batch in batches:
                indices.extend(batch.indices.tolist())
                yield to_float(batch.images)

        reconstruct = mode_reconstruction(self.model, self.networks, noise)
        sums = reconstruction_sums(reconstruct, images(), lpips_of(self.networks.terms), each_psnr)
        return {"": sums | noise.sums(), **self.slices.sums(indices, each_psnr)}

    def metrics(self, sums: dict[str, Sums], dist: Distributed) -> tuple[Metrics, dict[str, float]]:
        """The means over the images of all processes, and the mean PSNR of each slice."""
        reduced = _all_reduce(sums[""], dist)
        noise = {name: reduced.pop(name) for name in list(reduced) if name.startswith(LATENTS)}
        facts = noise_facts(noise)
        self.channel_std = channel_facts(noise)[0] if facts else None
        return means(reduced) | facts, self.slices.means(sums, dist)


@dataclass(frozen=True)
class NoiseCurveMeter:
    """Measures reconstructions from latents with noise, as the errors of a diffusion model leave it."""

    model: AutoencoderKL
    dtype: torch.dtype
    channel_std: torch.Tensor  # (C,) of the latents

    def sums(self, batches: Iterable[Batch]) -> dict[str, Sums]:
        """Sums of PSNR by tau over the images of `batches`; each image has the same noise every time."""
        totals = {f"psnr_noise_{tau:g}": (0.0, 0) for tau in NOISES}
        for batch in batches:
            images = to_float(batch.images)
            latents = encode_images(self.model, images, dtype=self.dtype).mode().float()
            draws = [
                keyed_normal(latents.shape[1:], NOISE_SEED, index, device=latents.device)
                for index in batch.indices.tolist()
            ]
            noise = torch.stack(draws) * self.channel_std[:, None, None].to(latents)
            decode = partial(decode_latents, self.model, size=images.shape[2:], dtype=self.dtype)
            curve = noise_curve(decode, latents, noise, images, NOISES).clamp(max=OFF_BY_ONE_DB)
            for name, value in zip(totals, curve.sum(1).tolist(), strict=True):
                totals[name] = totals[name][0] + value, totals[name][1] + len(images)
        return {"": totals}

    def metrics(self, sums: dict[str, Sums], dist: Distributed) -> Metrics:
        """The means over the images of all processes."""
        reduced = means(_all_reduce(sums[""], dist))
        del reduced["images"]
        return reduced


@dataclass(frozen=True)
class BaselineMeter:
    """Measures two baselines: the mean colour, and area reduction by `factor` with bicubic enlargement."""

    networks: Networks
    factor: int

    def sums(self, batches: Iterable[Batch]) -> dict[str, Sums]:
        """Sums over the images of `batches`, on their device, by baseline."""
        images = (to_float(batch.images) for batch in batches)
        return baseline_sums(images, lpips_of(self.networks.terms), self.factor)

    def metrics(self, sums: dict[str, Sums], dist: Distributed) -> dict[str, Metrics]:
        """The means over the images of all processes, by baseline."""
        return {name: means(_all_reduce(sums[name], dist)) for name in sorted(sums)}


def _all_reduce(sums: Sums, dist: Distributed) -> Sums:
    names = sorted(sums)
    totals = dist.all_reduce_scalars(*[number for name in names for number in sums[name]])
    return {name: (totals[2 * i], int(totals[2 * i + 1])) for i, name in enumerate(names)}


def validation_line(when: str, metrics: Metrics, precision: str, baseline: Metrics, factor: int) -> str:
    """One line that compares a validation with the bicubic baseline of the same downsampling factor."""
    return f"{when}: {_shown('VAE', metrics)}, {precision} | {_shown(f'{factor}x bicubic', baseline)}"


def _shown(name: str, metrics: Metrics) -> str:
    if "psnr" not in metrics:
        return f"{name} no usable image"
    lpips = f", LPIPS {metrics['lpips']:.4f}" if "lpips" in metrics else ""
    return f"{name} PSNR {metrics['psnr']:.2f} dB, SSIM {metrics['ssim']:.4f}{lpips}"
