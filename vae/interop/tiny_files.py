"""Files of a tiny decoder: a folder for diffusers' AutoencoderTiny, or taesd's names, which ComfyUI reads.

Programs give it the latents of a diffusion model. The metadata contain how these follow from the VAE's.
The encoder of an AutoencoderTiny is all zero, because it was not trained.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vae.config.options import TINY_WIDTH
from vae.device import DTYPES
from vae.interop.families import FAMILIES, TINY_CLASS
from vae.interop.latent_statistics import LatentConstants
from vae.interop.modelspec import modelspec
from vae.interop.safetensors_file import stored_weights, write_safetensors
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import IMAGE_CHANNELS, AutoencoderKL
from vae.model.tiny import TinyBlock, TinyDecoder
from vae.system import console
from vae.system.files import write_json

TAESD = "https://github.com/madebyollin/taesd"  # whose parameter names single files have
TAEF2_CHANNELS = 32  # taef2, for FLUX.2's latents, has group norms in its first blocks


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
    weights = {name: value for name, value in stored.items() if name.startswith("layers.")}
    content = {"_class_name": TINY_CLASS, "_diffusers_version": "0.35.0"}
    content |= FAMILIES[TINY_CLASS].config(model.config)
    metadata = {"latents_mean": json.dumps(mean), "latents_std": json.dumps(std)}
    source = TAESD if is_single else "diffusers"
    metadata |= modelspec(model, output, size, implementation=source, license=license)
    if is_single:  # the first layer of taesd limits the latents
        weights = {f"{int(n.split('.')[1]) + 1}.{n.split('.', 2)[2]}": v for n, v in weights.items()}
        write_safetensors(output, weights, metadata)
        if len(mean) == TAEF2_CHANNELS:
            console.warning(
                "programs take a tiny decoder with 32 latent channels for taef2, which has other layers, so "
                "they cannot read this file: write a folder for diffusers"
            )
    else:
        weights = {f"decoder.{name}": value for name, value in weights.items()}
        weights |= {n: value.to(DTYPES[dtype]) for n, value in _empty_encoder(content, decoder).items()}
        write_safetensors(output / WEIGHTS_NAME, weights, metadata)
        write_json(output / "config.json", dict(sorted(content.items())), indent=2)
    is_equal = len(set(mean)) == len(set(std)) == 1
    console.info(
        "this decoder reads latents as diffusion models have them: "
        + (f"(z - {mean[0]:g}) * {1 / std[0]:.5g}" if is_equal else "(z - latents_mean) / latents_std")
    )
    return content


def _empty_encoder(content: dict[str, Any], decoder: TinyDecoder) -> dict[str, torch.Tensor]:
    """The encoder of an AutoencoderTiny with this config.json, all zero: diffusers warns without one."""
    layers: list[nn.Module] = []
    for level, blocks in enumerate(content["num_encoder_blocks"]):
        layers.append(nn.Conv2d(TINY_WIDTH if level else IMAGE_CHANNELS, TINY_WIDTH, 3, bias=not level))
        layers += [TinyBlock(TINY_WIDTH) for _ in range(blocks)]
    encoder = nn.Sequential(*layers, nn.Conv2d(TINY_WIDTH, len(decoder.latents_mean), 3))
    return {f"encoder.layers.{name}": torch.zeros_like(value) for name, value in encoder.state_dict().items()}
