"""The diffusers format of a VAE: a folder with config.json and diffusion_pytorch_model.safetensors.

The model uses diffusers' parameter names, so the file contains its state_dict unchanged.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from vae.config.options import ModelConfig
from vae.interop.families import FAMILIES, PADDING_KEY, check_class, class_of, latents_config
from vae.interop.latent_statistics import LatentConstants
from vae.interop.safetensors_file import write_safetensors
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import UserError
from vae.system.files import parse_json, read_json, write_json

# Pipelines of SDXL apply scaling_factor *and* the channels' constants if config.json has both; its training
# scripts, and programs for SD 1.x, apply scaling_factor alone. For these, latents would not be the same.
SDXL_CHANNELS = 4


def diffusers_config(
    model: ModelConfig,
    sample_size: int,
    scaling_factor: float,
    shift_factor: float,
    force_upcast: bool = False,
) -> dict[str, Any]:
    """Content of config.json, for from_pretrained if diffusers has such a class.

    With `force_upcast`, fp16 pipelines run the VAE in fp32.
    """
    name = class_of(model)
    shape = {
        "_class_name": name,
        "_diffusers_version": "0.35.0",
        "in_channels": 3,
        "latent_channels": model.z_channels,
        "out_channels": 3,
        "sample_size": sample_size,
    }
    shape |= FAMILIES[name].config(model)
    if model.padding != "zeros":
        shape[PADDING_KEY] = model.padding
    if model.latent_norm:  # it replaces scaling and shift
        return shape
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


def describe(
    model: AutoencoderKL,
    sample_size: int,
    constants: LatentConstants,
    *,
    force_upcast: bool = False,
    were_in_config: bool = False,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Content of config.json, and what the metadata of the weights say about the latents.

    `were_in_config`: the start of `model` had the channels' constants there.
    """
    config = diffusers_config(
        model.config, sample_size, constants.scaling, constants.shift, force_upcast
    ) | latents_config(model.bn)
    if model.bn is not None:
        return config, {}
    return config | channel_config(constants, were_in_config), channel_metadata(constants)


def save_diffusers_folder(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write weights, with diffusers names, and a config from diffusers_config; each file atomically."""
    if config.get("_class_name") == "AsymmetricAutoencoderKL":
        dtype = weights["decoder.conv_in.weight"].dtype
        weights = weights | _condition_encoder(config["up_block_out_channels"], dtype)
    write_safetensors(folder / WEIGHTS_NAME, weights, metadata or {})
    write_json(folder / "config.json", dict(sorted(config.items())), indent=2)


def _condition_encoder(channels: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The part of AsymmetricAutoencoderKL that reads masks, all zero: without a mask it is not used."""
    first = channels[0]
    last = channels[-1]
    widths = [3, *(min(first * 2**level, last) for level in range(3))]
    widths += [min(first * 8, last), last]
    tensors = {}
    for layer, (before, after) in enumerate(pairwise(widths)):
        size = 3 if layer < 2 else 4
        name = f"decoder.condition_encoder.layers.{layer}"
        tensors[f"{name}.weight"] = torch.zeros(after, before, size, size, dtype=dtype)
        tensors[f"{name}.bias"] = torch.zeros(after, dtype=dtype)
    return tensors


def read_config(config_path: Path, where: str) -> dict[str, Any]:
    """Content of a config.json; UserError if it is for another class."""
    try:
        config = read_json(config_path)
    except OSError as error:
        raise UserError(f"{where}: its config.json cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{where}: its config.json is not valid JSON: {error}") from None
    return check_class(config, where, "config.json")


def parse_config(text: str, where: str, source: str) -> dict[str, Any]:
    """The JSON object in `text`; UserError with the name `source` if it is invalid or for another class."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise UserError(f"{where}: its {source} is not valid JSON: {error}") from None
    return check_class(config, where, source)
