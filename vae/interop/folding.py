"""Folding a scaling and shift of latents into the weights of encoder and decoder.

A program with fixed constants reads latents as (z - shift) * scaling. With folded weights the encoder gives
z' = z * multiply + add, which matches these constants, and the decoder inverts it: images are unchanged.

Shapes: Z latent channels; `multiply` and `add` are (Z,) fp64.
"""

import dataclasses

import torch

from vae.interop.latent_statistics import LatentStatistics
from vae.model.autoencoder import AutoencoderKL, Decoder
from vae.system.errors import UserError


def folding_for(
    statistics: LatentStatistics, scaling: float, shift: float, *, per_channel: bool, with_shift: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiply, add) such that (z' - shift) * scaling has standard deviation 1 and, `with_shift`, mean 0."""
    if per_channel:
        std, mean = statistics.std, statistics.mean
    else:
        std = torch.full_like(statistics.std, 1 / statistics.scaling)
        mean = torch.full_like(statistics.mean, statistics.shift)
    multiply = 1 / (std * scaling)
    add = shift - mean * multiply if with_shift else torch.zeros_like(multiply)
    return multiply, add


@torch.no_grad()
def fold(model: AutoencoderKL, multiply: torch.Tensor, add: torch.Tensor) -> None:
    """Change the weights of `model` so that it encodes to z * multiply + add and decodes from it.

    Without quant convolutions `add` must be 0: the decoder's first convolution pads latents with zeros, which
    would then represent another latent at the border.
    """
    has_quant_conv = model.quant_conv is not None
    assert has_quant_conv or not add.any(), "a shift cannot be folded without quant convolutions"
    z = len(multiply)
    last = model.encoder.conv_out if model.quant_conv is None else model.quant_conv
    assert isinstance(model.decoder, Decoder)
    first = model.decoder.conv_in if model.post_quant_conv is None else model.post_quant_conv
    assert last.bias is not None
    assert first.bias is not None
    weight, bias = last.weight.double(), last.bias.double()
    weight[:z] *= multiply[:, None, None, None]
    bias[:z] = bias[:z] * multiply + add
    bias[z:] += 2 * multiply.log()  # log-variances
    last.weight.copy_(weight)
    last.bias.copy_(bias)
    weight = first.weight.double() / multiply[None, :, None, None]  # reads (z' - add) / multiply
    if has_quant_conv:
        first.bias.copy_(first.bias.double() - weight.sum((2, 3)) @ add)
    first.weight.copy_(weight)


def with_quant_conv(model: AutoencoderKL) -> AutoencoderKL:
    """The same VAE with identity 1x1 convolutions before and after its latents."""
    if model.quant_conv is not None:
        raise UserError("--add_quant_conv: the VAE already has quant convolutions: omit the flag")
    wider = AutoencoderKL(dataclasses.replace(model.config, use_quant_conv=True))
    wider.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for conv in (wider.quant_conv, wider.post_quant_conv):
            assert conv is not None
            assert conv.bias is not None
            torch.nn.init.dirac_(conv.weight)
            conv.bias.zero_()
    return wider.eval().requires_grad_(False)
