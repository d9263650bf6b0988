"""A VAE as a file, and commands of infer_vae.py run in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vae.config.infer_flags import parse_infer_flags
from vae.config.options import ModelConfig
from vae.inference.running import infer
from vae.interop.diffusers_folder import diffusers_config, save_diffusers_folder
from vae.interop.vae_files import load_vae
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize

# Three levels, so that sides must be multiples of four; the warm start makes images one can recognise.
SMALL = ModelConfig(channels=(16, 32, 32), layers_per_block=1, norm_groups=8, z_channels=16)


def write_vae(folder: Path, seed: int = 0) -> Path:
    """A diffusers folder with a new network of `seed`."""
    model = AutoencoderKL(SMALL)
    initialize(model, "warm", seed)
    with torch.no_grad():  # something beside the linear codec in every layer
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    config = diffusers_config(SMALL, 32, 0.5, 0.25)
    save_diffusers_folder(folder, model.state_dict(), config)
    return folder


@pytest.fixture(scope="session")
def vae_folder(tmp_path_factory) -> Path:
    return write_vae(tmp_path_factory.mktemp("vae") / "vae")


@pytest.fixture
def command(vae_folder, tmp_path) -> Callable[..., int]:
    """infer_vae.py with --mode and other words; the VAE is `vae_folder` unless --vae is among them."""

    def run(mode: str, *words: object) -> int:
        argv = ["--mode", mode, "--device", "cpu", *map(str, words)]
        if "--vae" not in argv:
            argv += ["--vae", str(vae_folder)]
        if "--output_dir" not in argv:
            argv += ["--output_dir", str(tmp_path / "out")]
        return infer(parse_infer_flags(argv), load_vae)

    return run
