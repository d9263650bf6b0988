"""A small VAE as a diffusers folder, for tests of the scripts that use a trained VAE."""

import functools
from pathlib import Path

import torch

from vae.config.model_options import ModelConfig
from vae.interop.vae_files import START_KEY
from vae.interop.writing import diffusers_config, save_diffusers_folder
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize

# Three levels, so sides are padded to multiples of four. The warm start makes reconstructions recognisable.
SMALL = ModelConfig(channels=(16, 32, 32), layers_per_block=1, norm_groups=8, z_channels=16)


def write_vae(
    folder: Path, seed: int = 0, shape: ModelConfig = SMALL, start: str = "", init: str = "warm"
) -> Path:
    """Write a new network with weights from `seed`; `start`: the hash of those that its run began with."""
    config = diffusers_config(shape, 32, 0.5, 0.25)
    save_diffusers_folder(folder, weights(seed, shape, init), config, {START_KEY: start} if start else {})
    return folder


@functools.cache  # a warm start takes most of a second
def weights(seed: int, shape: ModelConfig, init: str) -> dict[str, torch.Tensor]:
    """Weights from `seed`; not to be changed."""
    model = AutoencoderKL(shape)
    initialize(model, init, seed)
    with torch.no_grad():  # so that no layer is only a linear codec
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return model.state_dict()
