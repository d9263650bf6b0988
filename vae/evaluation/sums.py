"""Metrics over a set of images, as sums that the ranks of a distributed run can add.

Shapes: B images of H x W px, three channels, in [-1, 1].
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vae.evaluation.baselines import bicubic_baseline, mean_colour
from vae.evaluation.metrics import ssim
from vae.images.psnr import OFF_BY_ONE_DB, psnr

Sums = dict[str, tuple[float, int]]  # metric -> (sum over images, number of images)
Perceptual = Callable[[Tensor, Tensor], Tensor]


def reconstruction_sums(
    reconstruct: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    perceptual: Perceptual | None,
    each_psnr: list[float] | None = None,
) -> Sums:
    """Sums of psnr, ssim and lpips over all images of `batches`; no lpips if `perceptual` is None.

    The PSNR of an image counts up to OFF_BY_ONE_DB, also for the baselines.

    `reconstruct` and `perceptual` compute on the device of the batches, (B, 3, H, W) in [-1, 1].
    Reconstructions of any dtype are measured in fp32 or wider; lpips has the precision of `perceptual`.
    `each_psnr` gets the PSNR of every image, in their order.
    """
    values = _values_of({"recon": reconstruct}, batches, perceptual)["recon"]
    if each_psnr is not None and values["psnr"]:
        each_psnr += torch.cat(values["psnr"]).tolist()
    return {metric: _total(parts) for metric, parts in values.items()}


def baseline_sums(
    batches: Iterable[Tensor], perceptual: Perceptual | None, factor: int = 8
) -> dict[str, Sums]:
    """The sums of reconstruction_sums for the baselines mean_colour and bicubic, by name.

    `factor` is the downsampling factor of the autoencoder.
    """
    baselines = {"mean_colour": mean_colour, "bicubic": lambda images: bicubic_baseline(images, factor)}
    values_of = _values_of(baselines, batches, perceptual)
    return {
        name: {metric: _total(parts) for metric, parts in values.items()}
        for name, values in values_of.items()
    }


def means(sums: Sums) -> dict[str, float]:
    """Mean of each metric that has values, and `images`, the number of images."""
    means_of: dict[str, float] = {name: value / count for name, (value, count) in sums.items() if count}
    means_of["images"] = max((count for _, count in sums.values()), default=0)
    return means_of


@torch.no_grad()
def _values_of(
    reconstructions: dict[str, Callable[[Tensor], Tensor]],
    batches: Iterable[Tensor],
    perceptual: Perceptual | None,
) -> dict[str, dict[str, list[Tensor]]]:
    """Every metric of all images, on their device: name -> metric -> parts (B,)."""
    metrics = ["psnr", "ssim"] + (["lpips"] if perceptual is not None else [])
    kept: dict[str, dict[str, list[Tensor]]] = {
        name: {metric: [] for metric in metrics} for name in reconstructions
    }
    for images in batches:
        images = images.float()
        for name, reconstruct in reconstructions.items():
            recon = reconstruct(images).float().clamp(-1, 1)  # the range of a saved image
            for metric, values in _measure(recon, images, perceptual).items():
                kept[name][metric].append(values.double())
    return kept


def _measure(recon: Tensor, images: Tensor, perceptual: Perceptual | None) -> dict[str, Tensor]:
    """Every metric of each image: name -> (B,)."""
    values = {"psnr": psnr(recon, images).clamp(max=OFF_BY_ONE_DB), "ssim": ssim(recon, images)}
    if perceptual is not None:
        values["lpips"] = perceptual(recon, images)
    return values


def _total(values: list[Tensor]) -> tuple[float, int]:
    """Sum and count; only here does the host wait for the device."""
    if not values:
        return 0.0, 0
    whole = torch.cat(values)
    return whole.sum().item(), whole.numel()
