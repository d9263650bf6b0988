"""Writing VAEs: safetensors files, and the folder of diffusers with its config.json.

The model uses diffusers' parameter names, so the file in a folder contains its state_dict unchanged.

A tiny decoder is written as a folder for diffusers' AutoencoderTiny, or with taesd's names, which ComfyUI
reads. Programs give it the latents of a diffusion model. The metadata contain how these follow from the
VAE's. Its encoder is all zero, because it was not trained. A whole AutoencoderTiny is written as other VAEs.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from vae.config.model_options import ModelConfig
from vae.config.resolve import tiny_shape
from vae.device import DTYPES
from vae.interop.families import (
    FAMILIES,
    PADDING_KEY,
    TAEF2_CHANNELS,
    TINY_CLASS,
    check_class,
    class_of,
    latents_config,
)
from vae.interop.latent_statistics import LatentConstants
from vae.interop.model_card import modelspec
from vae.interop.parameter_names import to_taesd
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import AutoencoderKL
from vae.model.tiny import TinyDecoder, TinyEncoder
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import replace_bytes, utf8_path, utf8_text, write_json

TAESD = "https://github.com/madebyollin/taesd"  # whose parameter names single files have
# Pipelines of SDXL apply scaling_factor *and* the channels' constants if config.json has both; its training
# scripts, and programs for SD 1.x, apply scaling_factor alone. For these, latents would not be the same.
SDXL_CHANNELS = 4


def stored_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it has none or cannot be read."""
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def stored_weights(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors of a model on the CPU, its weights in `dtype` (fp32, fp16 or bf16).

    Buffers stay as they are: they are the constants of latents, which config.json has in fp32 too. Raises
    UserError if a weight is too large for fp16.
    """
    stored = {}
    weights = {name for name, _ in model.named_parameters()}
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        if name in weights:
            value = value.to(DTYPES[dtype])
            if not torch.isfinite(value).all():
                raise UserError(
                    f"--dtype {dtype} cannot represent {name}: its values are too large; use bf16 or fp32"
                )
        stored[name] = value
    return stored


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; OSError if it cannot be written."""
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    metadata = {"format": "pt"} | {name: utf8_text(value) for name, value in metadata.items()}
    replace_bytes(path, save(tensors, metadata=metadata))


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
        "in_channels": model.image_channels,
        "latent_channels": model.z_channels,
        "out_channels": model.image_channels * model.up_scale**2,
    }
    if name != TINY_CLASS:  # which does not know it
        shape["sample_size"] = sample_size
    shape |= FAMILIES[name](model)
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
    if model.bn is not None or model.config.is_tiny:
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
        weights = weights | _condition_encoder(config["out_channels"], config["up_block_out_channels"], dtype)
    write_safetensors(folder / WEIGHTS_NAME, weights, metadata or {})
    write_json(folder / "config.json", dict(sorted(config.items())), indent=2)


def _condition_encoder(
    image_channels: int, channels: list[int], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The part of AsymmetricAutoencoderKL that reads masks, all zero: without a mask it is not used."""
    first = channels[0]
    last = channels[-1]
    widths = [image_channels, *(min(first * 2**level, last) for level in range(3))]
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
        text = config_path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: its config.json cannot be read: {error}") from None
    return parse_config(text, where, "config.json")


def parse_config(text: str, where: str, source: str) -> dict[str, Any]:
    """The JSON object in `text`; UserError with the name `source` if it is invalid or for another class."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: its {source} is not valid JSON: {error}") from None
    return check_class(config, where, source)


# ---- Tiny decoders ---------------------------------------------------------------------------------------


@torch.no_grad()
def normalize_latents(model: AutoencoderKL, constants: LatentConstants | None) -> None:
    """Let the tiny decoder of `model` read latents as diffusion models of the VAE have them.

    `constants` are needed without a latent norm.
    """
    decoder = model.decoder
    assert isinstance(decoder, TinyDecoder)
    if model.bn is not None:
        patches = model.config.z_channels, -1  # FLUX.2: those of all positions of a patch together
        mean, variance = (value.view(patches) for value in (model.bn.running_mean, model.bn.running_var))
        decoder.latents_mean.copy_(mean.mean(1))
        variance = variance.mean(1) + mean.var(1, correction=0) + model.bn.eps
        decoder.latents_std.copy_(variance.sqrt())
    else:
        assert constants is not None
        decoder.latents_mean.fill_(constants.shift)
        decoder.latents_std.fill_(1 / constants.scaling)


def write_tiny(
    output: Path, model: AutoencoderKL, dtype: str, size: int, license: str | None, *, is_single: bool
) -> dict[str, Any]:
    """Write the decoder alone, as a folder or a single file; returns the config.json."""
    decoder = model.decoder
    assert isinstance(decoder, TinyDecoder)
    mean, std = ([float(f"{x:.6g}") for x in v.tolist()] for v in (decoder.latents_mean, decoder.latents_std))
    stored = stored_weights(decoder, dtype)
    weights = {f"decoder.{name}": value for name, value in stored.items() if name.startswith("layers.")}
    content = {"_class_name": TINY_CLASS, "_diffusers_version": "0.35.0"}
    content |= FAMILIES[TINY_CLASS](model.config)
    metadata = {"latents_mean": json.dumps(mean), "latents_std": json.dumps(std)}
    source = TAESD if is_single else "diffusers"
    metadata |= modelspec(model, output, size, implementation=source, license=license)
    if is_single:
        write_safetensors(output, to_taesd(weights, "decoder"), metadata)
        if len(mean) == TAEF2_CHANNELS:
            console.warning(
                "programs take a tiny decoder with 32 latent channels for taef2, which has other layers, so "
                "they cannot read this file: write a folder for diffusers"
            )
    else:
        weights |= {n: value.to(DTYPES[dtype]) for n, value in _empty_encoder(model.config).items()}
        write_safetensors(output / WEIGHTS_NAME, weights, metadata)
        write_json(output / "config.json", dict(sorted(content.items())), indent=2)
    is_equal = len(set(mean)) == len(set(std)) == 1
    console.info(
        "this decoder reads latents as diffusion models have them: "
        + (f"(z - {mean[0]:g}) * {1 / std[0]:.5g}" if is_equal else "(z - latents_mean) / latents_std")
    )
    return content


def _empty_encoder(config: ModelConfig) -> dict[str, torch.Tensor]:
    """The encoder of an AutoencoderTiny for this tiny decoder, all zero: diffusers warns without one."""
    encoder = TinyEncoder(replace(config, **tiny_shape(config.z_channels, len(config.channels))))
    return {f"encoder.{name}": torch.zeros_like(value) for name, value in encoder.state_dict().items()}
