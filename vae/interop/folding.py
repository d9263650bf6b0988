"""Folding a scaling and shift of latents into the weights that make and read them.

A program with fixed constants reads latents as (z - shift) * scaling. Folded weights make another latent,
z' = z * multiply + add, that these constants suit, and the decoder undoes it: images stay the same.

Shapes: Z latent channels; `multiply` and `add` are (Z,) fp64.
"""

import dataclasses

import torch

from vae.config.errors import UserError
from vae.interop.latent_statistics import LatentStatistics
from vae.model.autoencoder import AutoencoderKL


def folding_for(
    statistics: LatentStatistics, scaling: float, shift: float, *, per_channel: bool, with_shift: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiply, add) such that (z' - shift) * scaling has spread 1 and, `with_shift`, mean 0."""
    if per_channel:
        spread, mean = statistics.std, statistics.mean
    else:
        spread = torch.full_like(statistics.std, 1 / statistics.scaling)
        mean = torch.full_like(statistics.mean, statistics.shift)
    multiply = 1 / (spread * scaling)
    add = shift - mean * multiply if with_shift else torch.zeros_like(multiply)
    return multiply, add


@torch.no_grad()
def fold(model: AutoencoderKL, multiply: torch.Tensor, add: torch.Tensor) -> None:
    """Make `model` encode to z * multiply + add and decode from it, by its weights alone.

    Without quant convolutions `add` must be 0: the decoder's first convolution pads latents with zeros, which
    would then mean another latent at the border.
    """
    quantised = model.quant_conv is not None
    assert quantised or not add.any(), "a shift cannot be folded without quant convolutions"
    z = len(multiply)
    last = model.quant_conv if quantised else model.encoder.conv_out
    first = model.post_quant_conv if quantised else model.decoder.conv_in
    weight, bias = last.weight.double(), last.bias.double()
    weight[:z] *= multiply[:, None, None, None]
    bias[:z] = bias[:z] * multiply + add
    bias[z:] += 2 * multiply.log()  # log-variances
    last.weight.copy_(weight)
    last.bias.copy_(bias)
    weight = first.weight.double() / multiply[None, :, None, None]  # reads (z' - add) / multiply
    if quantised:
        first.bias.copy_(first.bias.double() - weight.sum((2, 3)) @ add)
    first.weight.copy_(weight)


def with_quant_conv(model: AutoencoderKL) -> AutoencoderKL:
    """The same VAE with 1x1 convolutions around its latent, which change nothing yet."""
    if model.quant_conv is not None:
        raise UserError("--add_quant_conv: the VAE has its quant convolutions already: leave the flag out")
    wider = AutoencoderKL(dataclasses.replace(model.config, use_quant_conv=True))
    wider.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for conv in (wider.quant_conv, wider.post_quant_conv):
            torch.nn.init.dirac_(conv.weight)
            conv.bias.zero_()
    return wider.eval().requires_grad_(False)
