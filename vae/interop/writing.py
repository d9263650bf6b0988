"""Writing VAEs: safetensors files, and the folder of diffusers with its config.json.

The model uses diffusers' parameter names, so the file in a folder contains its state_dict unchanged.

A tiny decoder is written as a folder for diffusers' AutoencoderTiny, or with taesd's names, which ComfyUI
reads. Programs give it the latents of a diffusion model. The metadata contain how these follow from the
VAE's. Its encoder is all zero, because it was not trained. A whole AutoencoderTiny is written as other VAEs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from vae.config.model_options import ModelConfig
from vae.config.resolve import tiny_shape
from vae.device import DTYPES
from vae.interop.families import FAMILIES, PADDING_KEY, TAEF2_CHANNELS, TINY_CLASS, check_class, class_of
from vae.interop.latent_statistics import LatentConstants, norm_constants
from vae.interop.parameter_names import to_compvis, to_taesd
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import AutoencoderKL
from vae.model.tiny import TinyDecoder, TinyEncoder
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import replace_bytes, utf8_text, write_json

DIFFUSERS_VERSION = "0.35.0"
CONFIG_KEY = "vae_config"  # metadata key of single files: config.json as text
MODELSPEC = "modelspec."  # beginning of the metadata keys of ModelSpec
_INHERITED = ("architecture", "author", "license", "usage_hint", "category", "description")
# Single files have the parameter names of these programs.
COMPVIS = "https://github.com/CompVis/latent-diffusion"
TAESD = "https://github.com/madebyollin/taesd"
# Pipelines of SDXL apply scaling_factor *and* the channels' constants if config.json has both; its training
# scripts, and programs for SD 1.x, apply scaling_factor alone. For these, latents would not be the same.
SDXL_CHANNELS = 4


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
    scaling_factor: float | None,
    shift_factor: float = 0.0,
    force_upcast: bool = False,
) -> dict[str, Any]:
    """Content of config.json, for from_pretrained if diffusers has such a class.

    With `force_upcast`, fp16 pipelines run the VAE in fp32.
    """
    if model.module:
        config = {**json.loads(model.module), "_diffusers_version": DIFFUSERS_VERSION}
        return config | ({"scaling_factor": scaling_factor} if "scaling_factor" in config else {})
    name = class_of(model)
    shape = {
        "_class_name": name,
        "_diffusers_version": DIFFUSERS_VERSION,
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
    shape["force_upcast"] = force_upcast
    if scaling_factor is not None:
        shape |= {"scaling_factor": scaling_factor, "shift_factor": shift_factor}
    return shape


@dataclass(frozen=True)
class WritePlan:
    """The format of a VAE's file or folder, and what it says beside the weights."""

    sample_size: int  # training image size, px
    constants: LatentConstants
    title: str  # for people, in the metadata
    dtype: str = "fp32"
    is_single: bool = False  # one file with the names of the research code, instead of a folder of diffusers
    force_upcast: bool = False  # fp16 pipelines run it in fp32
    channels_were_in_config: bool = False  # the constants of channels, in the file that it comes from
    metadata: dict[str, str] = field(default_factory=dict)  # of its origin
    half: str | None = None  # of an AutoencoderTiny: "encoder" or "decoder" alone, in a single file
    comfyui_scaling: tuple[float, float] | None = None  # of a single AutoencoderTiny, which it reads as a VAE


def write_vae(model: AutoencoderKL, output: Path, plan: WritePlan) -> dict[str, Any]:
    """Write the VAE as a folder or a single file, each file atomically; returns its config.json."""
    config = diffusers_config(model.config, plan.sample_size, *plan.constants[:2], plan.force_upcast)
    metadata = _modelspec(model, plan) | plan.metadata
    channels = plan.constants.channels
    if model.bn is not None or model.config.is_tiny:
        config |= norm_constants(model.bn).channels
    else:
        metadata |= {name: json.dumps(values) for name, values in channels.items()}
        if model.config.module:  # its class knows these keys or not
            config |= {name: values for name, values in channels.items() if name in config}
        elif len(plan.constants.mean) != SDXL_CHANNELS or plan.channels_were_in_config:
            config |= channels
    weights = stored_weights(model, plan.dtype)
    if not plan.is_single:
        save_diffusers_folder(output, weights, config, metadata)
        return config
    if model.config.is_tiny:
        weights = to_taesd(weights, plan.half)
        if plan.comfyui_scaling is not None:
            scaling, shift = map(torch.tensor, plan.comfyui_scaling)
            weights |= {"vae_scale": scaling, "vae_shift": shift}
    elif model.config.family == "kl":
        weights = to_compvis(weights, quant_conv_inside=model.bn is not None)
    write_safetensors(output, weights, {**metadata, CONFIG_KEY: json.dumps(config)})
    return config


def constants_text(config: Mapping[str, Any]) -> str:
    """The constants of latents in the content of config.json, for people."""
    if config.get("scaling_factor") is not None:
        shift = config.get("shift_factor")  # few classes of diffusers know it
        return f"scaling {config['scaling_factor']:.5g}" + ("" if shift is None else f", shift {shift:.5g}")
    has_statistics = config.get("latents_mean") or "batch_norm_eps" in config  # FLUX.2 has them as weights
    return "latent statistics in the file" if has_statistics else "no constants of the latents"


def _modelspec(model: AutoencoderKL, plan: WritePlan) -> dict[str, str]:
    """The keys of ModelSpec in the metadata."""
    implementation = TAESD if model.config.is_tiny or model.config.decoder else COMPVIS
    if not plan.is_single or model.config.module:
        implementation = "diffusers"
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{class_of(model.config)}-z{model.config.z_channels}-f{model.encoder_downsampling}",
        "implementation": implementation,
        "title": plan.title,
        "resolution": f"{plan.sample_size}x{plan.sample_size}",
    }
    return {MODELSPEC + name: value for name, value in values.items()}


def kept_metadata(source: Mapping[str, str]) -> dict[str, str]:
    """The metadata of the file that was trained or converted that stay true of the result."""
    return {name: source[name] for name in map(MODELSPEC.__add__, _INHERITED) if name in source}


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
        assert constants.scaling is not None
        decoder.latents_mean.fill_(constants.shift)
        decoder.latents_std.fill_(1 / constants.scaling)


def write_tiny_decoder(model: AutoencoderKL, output: Path, plan: WritePlan) -> dict[str, Any]:
    """Write the tiny decoder of a VAE alone, as an AutoencoderTiny; returns its config.json."""
    decoder = model.decoder
    assert isinstance(decoder, TinyDecoder)
    mean, std = ([float(f"{x:.6g}") for x in v.tolist()] for v in (decoder.latents_mean, decoder.latents_std))
    stored = stored_weights(decoder, plan.dtype)
    weights = {f"decoder.{name}": value for name, value in stored.items() if name.startswith("layers.")}
    config = {"_class_name": TINY_CLASS, "_diffusers_version": DIFFUSERS_VERSION}
    config |= FAMILIES[TINY_CLASS](model.config)
    constants = {"latents_mean": json.dumps(mean), "latents_std": json.dumps(std)}
    metadata = _modelspec(model, plan) | plan.metadata | constants
    if plan.is_single:
        write_safetensors(output, to_taesd(weights, "decoder"), metadata)
        if len(mean) == TAEF2_CHANNELS:
            console.warning(
                "programs take a tiny decoder with 32 latent channels for taef2, which has other layers, so "
                "they cannot read this file: write a folder for diffusers"
            )
    else:
        # diffusers warns without an encoder.
        shape = tiny_shape(model.config.z_channels, len(model.config.channels))
        encoder = stored_weights(TinyEncoder(replace(model.config, **shape)), plan.dtype)
        weights |= {f"encoder.{name}": torch.zeros_like(value) for name, value in encoder.items()}
        save_diffusers_folder(output, weights, config, metadata)
    is_equal = len(set(mean)) == len(set(std)) == 1
    console.info(
        "this decoder reads latents as diffusion models have them: "
        + (f"(z - {mean[0]:g}) * {1 / std[0]:.5g}" if is_equal else "(z - latents_mean) / latents_std")
    )
    return config
