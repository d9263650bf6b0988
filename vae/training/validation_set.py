"""Validation of the shipped weights on held-out images, their baselines, and the sheets of samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from vae.config.options import DataConfig
from vae.data.loading import load_validation
from vae.evaluation.baselines import bicubic_baseline
from vae.evaluation.sums import Sums, baseline_sums, means, validate
from vae.model.autoencoder import IMAGE_CHANNELS, AutoencoderKL
from vae.pixels import to_float, to_uint8
from vae.step import Networks, network_input
from vae.training.distributed import Processes
from vae.training.logbook import say

SHEET_IMAGES = 4
SHEET_SIDE = 512  # px: larger crops are shown by their middle
ERROR_GAIN = 8
FEW_IMAGES = 32  # up to here starting processes takes longer than decoding


@dataclass
class Held:
    """The held-out images of a run."""

    root: Path
    names: list[str]
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # of the current stage, by codec
    rejected: set[str] = field(default_factory=set)

    def batches(
        self, data: DataConfig, image_size: int, batch: int, workers: int, processes: Processes
    ) -> Iterator[torch.Tensor]:
        """uint8 (B, 3, S, S) centre crops of this process's share, on its device."""
        names = self.names[processes.rank :: processes.world]
        loader = load_validation(
            self.root,
            names,
            image_size=image_size,
            batch_size=batch,
            upscale=data.upscale,
            background=data.background,
            max_pixels=data.max_pixels,
            num_workers=workers if len(names) > FEW_IMAGES else 0,
        )
        for loaded in loader:
            for rejection in loaded.rejected:
                if rejection.name not in self.rejected:
                    self.rejected.add(rejection.name)
                    say(f"held-out image skipped: {rejection}")
            if len(loaded.images):
                yield loaded.images.to(processes.device, non_blocking=True)


def mode_reconstruction(model: AutoencoderKL, networks: Networks) -> Callable[[torch.Tensor], torch.Tensor]:
    """images (B, 3, H, W) in [-1, 1] to reconstructions of the posterior's mode, in the compute dtype."""

    @torch.no_grad()
    def reconstruct(images: torch.Tensor) -> torch.Tensor:
        return model(network_input(images, networks))[0]

    return reconstruct


def validation_metrics(
    model: AutoencoderKL, networks: Networks, batches: Iterator[torch.Tensor], processes: Processes
) -> dict[str, float]:
    """Means of PSNR, SSIM and, where LPIPS is in the loss, LPIPS, over the images of all processes."""
    images = map(to_float, batches)
    return means(
        _over_all(validate(mode_reconstruction(model, networks), images, networks.perceptual), processes)
    )


def baseline_metrics(
    networks: Networks, batches: Iterator[torch.Tensor], factor: int, processes: Processes
) -> dict[str, dict[str, float]]:
    """The same metrics of two trivial codecs: mean colour, and area reduction with bicubic enlargement."""
    images = map(to_float, batches)
    sums = baseline_sums(images, networks.perceptual, factor)
    return {name: means(_over_all(sums[name], processes)) for name in sorted(sums)}


def _over_all(sums: Sums, processes: Processes) -> Sums:
    names = sorted(sums)
    totals = processes.sum_numbers(*[number for name in names for number in sums[name]])
    return {name: (totals[2 * i], int(totals[2 * i + 1])) for i, name in enumerate(names)}


def sample_sheet(model: AutoencoderKL, networks: Networks, images: torch.Tensor) -> np.ndarray:
    """uint8 (rows, columns, 3): per image input, reconstruction, error x 8, 8x bicubic for comparison."""
    images = images[:SHEET_IMAGES]
    reconstruct = mode_reconstruction(model, networks)
    truth = to_float(images)
    recon = torch.cat([reconstruct(one[None]).float() for one in truth]).clamp(-1, 1)
    error = ((recon - truth).abs() / 2 * ERROR_GAIN).clamp(0, 1) * 2 - 1
    small = bicubic_baseline(truth, model.downsampling)
    columns = torch.stack([truth, recon, error, small], dim=1)  # (N, 4, 3, S, S)
    side = columns.shape[-1]
    start = max(0, (side - SHEET_SIDE) // 2)
    columns = columns[..., start : start + SHEET_SIDE, start : start + SHEET_SIDE]
    count, kinds, _, height, width = columns.shape
    pixels = to_uint8(columns)
    sheet = pixels.permute(0, 3, 1, 4, 2).reshape(count * height, kinds * width, IMAGE_CHANNELS)
    return sheet.cpu().numpy()
