"""The diffusers format of a VAE: a folder with config.json and diffusion_pytorch_model.safetensors.

The model uses diffusers' parameter names, so the file contains its state_dict unchanged.
"""

import json
from pathlib import Path
from typing import Any

import torch

from vae.config.options import ModelConfig
from vae.interop.latent_statistics import LatentConstants
from vae.interop.safetensors_file import write_safetensors
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import LatentNorm
from vae.system.errors import UserError
from vae.system.files import parse_json, read_json, write_json

# Pipelines of SDXL apply scaling_factor *and* the channels' constants if config.json has both; its training
# scripts, and programs for SD 1.x, apply scaling_factor alone. For these, latents would not be the same.
SDXL_CHANNELS = 4
CLASSES = ("AutoencoderKL", "AutoencoderKLFlux2")  # without and with a latent norm


def diffusers_config(
    model: ModelConfig,
    sample_size: int,
    scaling_factor: float,
    shift_factor: float,
    force_upcast: bool = False,
) -> dict[str, Any]:
    """Content of config.json for from_pretrained of diffusers' AutoencoderKL or AutoencoderKLFlux2.

    With `force_upcast`, fp16 pipelines run the VAE in fp32.
    """
    levels = len(model.channels)
    shape = {
        "_class_name": CLASSES[model.latent_norm],
        "_diffusers_version": "0.35.0",
        "act_fn": "silu",
        "block_out_channels": list(model.channels),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "in_channels": 3,
        "latent_channels": model.z_channels,
        "layers_per_block": model.layers_per_block,
        "mid_block_add_attention": True,
        "norm_num_groups": model.norm_groups,
        "out_channels": 3,
        "sample_size": sample_size,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "use_post_quant_conv": model.use_quant_conv,
        "use_quant_conv": model.use_quant_conv,
    }
    if model.latent_norm:  # replaces scaling and shift
        return shape | {"batch_norm_eps": LatentNorm.EPS, "patch_size": [2, 2]}
    return shape | {
        "force_upcast": force_upcast,
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
    }


def channel_config(constants: LatentConstants, were_in_config: bool = False) -> dict[str, list[float]]:
    """`latents_mean` and `latents_std` for config.json, if known and no program would misread them."""
    if not constants.mean or (len(constants.mean) == SDXL_CHANNELS and not were_in_config):
        return {}
    return {"latents_mean": list(constants.mean), "latents_std": list(constants.std)}


def channel_metadata(constants: LatentConstants) -> dict[str, str]:
    """The same for the metadata of a safetensors file, with any number of channels."""
    if not constants.mean:
        return {}
    return {"latents_mean": json.dumps(constants.mean), "latents_std": json.dumps(constants.std)}


def save_diffusers_folder(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write weights, with diffusers names, and a config from diffusers_config; each file atomically."""
    write_safetensors(folder / WEIGHTS_NAME, weights, metadata or {})
    write_json(folder / "config.json", dict(sorted(config.items())), indent=2)


def read_config(config_path: Path, where: str) -> dict[str, Any]:
    """Content of a config.json; UserError if it is for another class."""
    try:
        config = read_json(config_path)
    except OSError as error:
        raise UserError(f"{where}: its config.json cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{where}: its config.json is not valid JSON: {error}") from None
    return _checked_class(config, where, "config.json")


def parse_config(text: str, where: str, source: str) -> dict[str, Any]:
    """The JSON object in `text`; UserError with the name `source` if it is invalid or for another class."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise UserError(f"{where}: its {source} is not valid JSON: {error}") from None
    return _checked_class(config, where, source)


def _checked_class(config: Any, where: str, source: str) -> dict[str, Any]:
    name = config.get("_class_name") if isinstance(config, dict) else type(config).__name__
    if name not in CLASSES:
        raise UserError(
            f"{where}: its {source} is for {name}, but only {' and '.join(CLASSES)} are supported"
        )
    return config
