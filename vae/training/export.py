"""The final export of a run: OUTPUT_DIR/vae, which diffusers.AutoencoderKL.from_pretrained loads."""

from collections.abc import Iterable
from pathlib import Path

import torch

from vae.interop.diffusers_folder import diffusers_config, save_diffusers_folder
from vae.interop.latent_statistics import LatentSums, add_patches, is_unmeasured, set_latent_norm
from vae.interop.safetensors_file import stored_weights
from vae.model.autoencoder import AutoencoderKL
from vae.pixels import to_float
from vae.step import Networks, network_input

LATENT_IMAGES = 256  # crops from which the latent statistics are measured


@torch.no_grad()
def latent_sums(
    model: AutoencoderKL, networks: Networks, batches: Iterable[torch.Tensor]
) -> tuple[LatentSums, LatentSums]:
    """Sums over the latents of uint8 (B, 3, H, W) batches, and over the 2x2 patches of the latents."""
    latents, patches = LatentSums(), LatentSums()
    for images in batches:
        posterior = model.encode(network_input(to_float(images), networks))
        latents.add(posterior.mean, posterior.logvar)
        if model.bn is not None:
            add_patches(patches, posterior)
    return latents, patches


def export_final(
    folder: Path,
    model: AutoencoderKL,
    networks: Networks,
    batches: Iterable[torch.Tensor],
    image_size: int,
    fixed_scaling: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Write the diffusers folder; returns scaling and shift: `fixed_scaling`, or measured on `batches`."""
    scaling, shift = fixed_scaling or (1.0, 0.0)
    latent_norm = model.bn if model.bn is not None and is_unmeasured(model.bn) else None
    if fixed_scaling is None or latent_norm is not None:
        latents, patches = latent_sums(model, networks, batches)
        if latent_norm is not None and patches.count:
            set_latent_norm(model, patches.statistics())
        if fixed_scaling is None and latents.count:
            measured = latents.statistics()
            scaling, shift = measured.scaling, measured.shift
    config = diffusers_config(model.config, image_size, scaling, shift)
    save_diffusers_folder(folder, stored_weights(model, "fp32"), config)
    return scaling, shift
