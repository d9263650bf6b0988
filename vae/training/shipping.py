"""The product of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads."""

from collections.abc import Iterable
from pathlib import Path

import torch

from vae.interop.diffusers_folder import save_diffusers_folder
from vae.model.autoencoder import AutoencoderKL
from vae.step import Networks, network_input, to_float

LATENT_IMAGES = 256  # crops that the latent statistics are taken over


@torch.no_grad()
def latent_statistics(
    model: AutoencoderKL, networks: Networks, batches: Iterable[torch.Tensor]
) -> tuple[float, float]:
    """(scaling, shift) such that (z - shift) * scaling has mean 0 and variance 1 over sampled latents.

    `batches` are uint8 (B, 3, H, W); sums are kept in fp64.
    """
    count, total, squares = 0, 0.0, 0.0
    for images in batches:
        posterior = model.encode(network_input(to_float(images), networks))
        mean = posterior.mean.double()
        count += mean.numel()
        total += mean.sum().item()
        squares += (mean.square() + posterior.logvar.double().exp()).sum().item()
    if count == 0:
        return 1.0, 0.0
    shift = total / count
    variance = max(squares / count - shift**2, 1e-12)
    return variance**-0.5, shift


def ship(
    folder: Path, model: AutoencoderKL, networks: Networks, batches: Iterable[torch.Tensor], image_size: int
) -> tuple[float, float]:
    """Write the diffusers folder; returns its scaling and shift."""
    scaling, shift = latent_statistics(model, networks, batches)
    save_diffusers_folder(folder, model, sample_size=image_size, scaling_factor=scaling, shift_factor=shift)
    return scaling, shift
