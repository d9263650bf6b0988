"""PSNR over 8-bit values, as images are displayed.

Shapes: B images of H x W px, three channels, floats in [-1, 1].
"""

import math

import torch
from torch import Tensor

PEAK = 255.0
# PSNR of an image of 33 megapixels with one 8-bit value off by one. Exact copies count as this value, not as
# infinity, so that means stay finite.
MAX_PSNR_DB = 128.0
# PSNR of an image with every 8-bit value off by one: 48.13. Training counts at most this much of an image, so
# that a few crops of one colour, which the bicubic baseline copies exactly, do not decide its mean.
OFF_BY_ONE_DB = 20 * math.log10(PEAK)


def psnr(recon: Tensor, images: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB over 8-bit values: -> (B,) fp64; inf if equal."""
    assert recon.shape == images.shape, f"{tuple(recon.shape)} is not {tuple(images.shape)}"
    error = to_8_bit(recon) - to_8_bit(images)
    mse = error.square().flatten(1).mean(1, dtype=torch.float64)
    return 10 * torch.log10(PEAK**2 / mse)


def to_8_bit(images: Tensor) -> Tensor:
    """Images in [-1, 1] as the values 0..255 of a saved image, clamped and rounded, in fp32 or wider."""
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    return ((wide.clamp(-1, 1) + 1) * (PEAK / 2)).round()
