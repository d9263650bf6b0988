"""Baseline reconstructions without a network, for comparison with a trained one on the same images.

Shapes: B images of H x W px, three channels, in [-1, 1].
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def mean_colour(images: Tensor) -> Tensor:
    """Each image filled with its mean colour: (B, 3, H, W) -> (B, 3, H, W)."""
    return images.mean((2, 3), keepdim=True).expand_as(images)


def bicubic_baseline(images: Tensor, factor: int = 8) -> Tensor:
    """Each image area-averaged by `factor`, then enlarged bicubically: (B, 3, H, W) -> (B, 3, H, W).

    `factor` is the downsampling factor of the autoencoder and must divide both sides. The bicubic filter is
    that of image programs (Keys 1981, a = -0.5), with weights renormalised at the borders. The result is
    clamped to [-1, 1].
    """
    height, width = images.shape[2:]
    assert height % factor == width % factor == 0, f"{width} x {height} px by {factor}"
    images = images.to(torch.promote_types(images.dtype, torch.float32))
    small = F.avg_pool2d(images, factor)  # (B, 3, H/factor, W/factor)
    # antialias=True selects a = -0.5 instead of -0.75; it smooths nothing in an enlargement
    large = F.interpolate(small, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
    return large.clamp(-1, 1)
