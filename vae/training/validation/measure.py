"""Validation of the exported weights, and of two baselines, on images that are never trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vae.config.options import DataConfig
from vae.data.dataset import Images
from vae.data.loading import load_validation
from vae.evaluation.latents import LATENTS, NoiseMeter, noise_facts
from vae.evaluation.sums import Sums, baseline_sums, means, reconstruction_sums
from vae.images.pixels import to_float
from vae.losses.perceptual import lpips_of
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks, network_input
from vae.system import console
from vae.training.distributed import Distributed
from vae.training.validation.slices import Slices

FEW_IMAGES = 32  # up to this number, starting worker processes takes longer than decoding

Metrics = dict[str, float]
# Calls a function with the validation batches of this process, again if necessary; returns its result.
Measure = Callable[[Callable[[Iterator[torch.Tensor]], dict[str, Sums]]], dict[str, Sums]]


@dataclass(frozen=True)
class ValidationSet:
    """The validation images of a run: the first `count` of a set, or those at `chosen` places of it."""

    images: Images
    count: int
    reported: set[str] = field(default_factory=set)  # unusable files that were reported
    chosen: tuple[int, ...] = ()  # if not empty, `count` indices
    label: Callable[[int], str | None] = lambda _index: None  # of an image, for slices

    def spread(self, most: int) -> "ValidationSet":
        """At most `most` of the images, at equal distances."""
        count = min(most, self.count)
        return replace(self, count=count, chosen=tuple(n * self.count // count for n in range(count)))

    def record(self) -> Any:
        """What `split.json` says about the images."""
        record = self.images.record()
        return record[: self.count] if isinstance(record, list) else {**record, "used": self.count}

    def share(self, dist: Distributed) -> Sequence[int]:
        """The indices of this process's images."""
        return (self.chosen or range(self.count))[dist.rank :: dist.world_size]

    def batches(
        self,
        data: DataConfig,
        image_size: int,
        batch_size: int,
        num_workers: int,
        dist: Distributed,
        while_waiting: Callable[[], None] = lambda: None,
        measured: list[int] | None = None,
    ) -> Iterator[torch.Tensor]:
        """uint8 (B, 3, S, S) centre crops of this process's share, on its device.

        `while_waiting` is called during waits for images, and may end them with an exception. `measured`
        gets the indices of the images.
        """
        indices = self.share(dist)
        loader = load_validation(
            self.images,
            indices,
            image_size=image_size,
            batch_size=batch_size,
            upscale=data.upscale,
            background=data.background,
            max_pixels=data.max_pixels,
            num_workers=num_workers if len(indices) > FEW_IMAGES else 0,
            while_waiting=while_waiting,
        )
        for batch in loader:
            for rejection in batch.rejected:
                if rejection.name not in self.reported:
                    self.reported.add(rejection.name)
                    console.info(f"validation image skipped: {rejection}")
            if len(batch.images):
                if measured is not None:
                    measured += batch.indices.tolist()
                yield batch.images.to(dist.device, non_blocking=True)


def mode_reconstruction(
    model: AutoencoderKL, networks: Networks, noise: NoiseMeter | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from images (B, 3, H, W) in [-1, 1] to their reconstructions by the posterior's mode.

    `noise` gets the posteriors.
    """

    @torch.no_grad()
    def reconstruct(images: torch.Tensor) -> torch.Tensor:
        recon, mean, logvar = model(network_input(images, networks))
        if noise is not None:
            noise.add(mean, logvar)
        return recon

    return reconstruct


def validation_metrics(
    model: AutoencoderKL, networks: Networks, measure: Measure, dist: Distributed, slices: Slices
) -> tuple[Metrics, dict[str, float]]:
    """Mean PSNR, SSIM and, if LPIPS is part of the loss, LPIPS, over the images of all processes.

    Also the facts about the posterior's noise, and the mean PSNR of each slice.
    """

    def sums_of(batches: Iterator[torch.Tensor]) -> dict[str, Sums]:
        psnr: list[float] = []
        noise = NoiseMeter(model.config.z_channels)
        reconstruct = mode_reconstruction(model, networks, noise)
        sums = reconstruction_sums(reconstruct, map(to_float, batches), lpips_of(networks.terms), psnr)
        return {"": sums | noise.sums(), **slices.sums(psnr)}

    sums = measure(sums_of)
    reduced = _all_reduce(sums[""], dist)
    noise = noise_facts({name: reduced.pop(name) for name in list(reduced) if name.startswith(LATENTS)})
    return means(reduced) | noise, slices.means(sums, dist)


def baseline_metrics(
    networks: Networks, measure: Measure, factor: int, dist: Distributed
) -> dict[str, Metrics]:
    """The same metrics of two baselines: the mean colour, and area reduction with bicubic enlargement."""
    sums = measure(lambda batches: baseline_sums(map(to_float, batches), lpips_of(networks.terms), factor))
    return {name: means(_all_reduce(sums[name], dist)) for name in sorted(sums)}


def _all_reduce(sums: Sums, dist: Distributed) -> Sums:
    names = sorted(sums)
    totals = dist.all_reduce_scalars(*[number for name in names for number in sums[name]])
    return {name: (totals[2 * i], int(totals[2 * i + 1])) for i, name in enumerate(names)}


def validation_line(when: str, metrics: Metrics, baseline: Metrics, factor: int) -> str:
    """One line that compares a validation with the bicubic baseline of the same downsampling factor."""
    return f"{when}: {_shown('VAE', metrics)} | {_shown(f'{factor}x bicubic', baseline)}"


def _shown(name: str, metrics: Metrics) -> str:
    if "psnr" not in metrics:
        return f"{name} no usable image"
    lpips = f", LPIPS {metrics['lpips']:.4f}" if "lpips" in metrics else ""
    return f"{name} PSNR {metrics['psnr']:.2f} dB, SSIM {metrics['ssim']:.4f}{lpips}"
