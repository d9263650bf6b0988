"""The product of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads."""

from collections.abc import Iterable
from pathlib import Path

import torch

from vae.interop.diffusers_folder import diffusers_config, save_diffusers_folder
from vae.interop.latent_statistics import LatentSums, add_patches, is_unmeasured, set_latent_norm
from vae.interop.safetensors_file import stored_weights
from vae.model.autoencoder import AutoencoderKL
from vae.pixels import to_float
from vae.step import Networks, network_input

LATENT_IMAGES = 256  # crops that the latent statistics are taken over


@torch.no_grad()
def latent_sums(
    model: AutoencoderKL, networks: Networks, batches: Iterable[torch.Tensor]
) -> tuple[LatentSums, LatentSums]:
    """Sums over the sampled latents of uint8 (B, 3, H, W) batches, and over their 2x2 patches."""
    latents, patches = LatentSums(), LatentSums()
    for images in batches:
        posterior = model.encode(network_input(to_float(images), networks))
        latents.add(posterior.mean, posterior.logvar)
        if model.bn is not None:
            add_patches(patches, posterior)
    return latents, patches


def ship(
    folder: Path,
    model: AutoencoderKL,
    networks: Networks,
    batches: Iterable[torch.Tensor],
    image_size: int,
    fixed: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Write the diffusers folder; returns its scaling and shift: `fixed`, or as measured on `batches`."""
    scaling, shift = fixed or (1.0, 0.0)
    measures_norm = model.bn is not None and is_unmeasured(model.bn)
    if fixed is None or measures_norm:
        latents, patches = latent_sums(model, networks, batches)
        if measures_norm and patches.count:
            set_latent_norm(model, patches.statistics())
        if fixed is None and latents.count:
            found = latents.statistics()
            scaling, shift = found.scaling, found.shift
    config = diffusers_config(model.config, image_size, scaling, shift)
    save_diffusers_folder(folder, stored_weights(model, "fp32"), config)
    return scaling, shift
