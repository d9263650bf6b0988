"""Conversions between uint8 pixels and the float values that networks compute with, and PSNR."""

import math

import torch
from torch import Tensor


def to_float(images: torch.Tensor) -> torch.Tensor:
    """uint8 images to fp32 in [-1, 1], for networks of any compute dtype."""
    return images.float() / 127.5 - 1


def as_float(images: torch.Tensor) -> torch.Tensor:
    """Images in fp32 in [-1, 1], from uint8 or from such floats."""
    return to_float(images) if images.dtype == torch.uint8 else images


def as_uint8(images: torch.Tensor) -> torch.Tensor:
    """Images in uint8, from uint8 or from floats in about [-1, 1]."""
    return images if images.dtype == torch.uint8 else to_uint8(images)


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Float images in about [-1, 1] to uint8, clamped and rounded to the nearest level."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# ---- PSNR over 8-bit values, as images are displayed -------------------------------------------------------
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
