"""Conversions between uint8 pixels and the float values that networks compute with."""

import torch


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
