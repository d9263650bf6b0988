"""Structural dissimilarity over three scales: a perceptual term without a network.

SSIM (Wang et al. 2004) compares means, contrasts and correlations within small windows. The mean of several
scales is simpler than the product of MS-SSIM (Wang, Simoncelli & Bovik 2003), which needs 176 px.

Windows are 7 x 7 means, as scikit-image's default, not a Gaussian: pooling is one kernel and stays fp32 where
convolutions are TF32, whose 10 bits are too few for a variance as a difference of two means.

It adds about 180 small kernels per micro-batch, forward and backward (operations counted on a CPU).

Shapes: B images of H x W px; h x w windows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.config.options import LossConfig
from vae.losses.terms import TermFunction
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Images, PerImage

SCALES = 3  # full size, half and a quarter
WINDOW = 7  # px at each scale
C1, C2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2  # Wang et al. 2004, for a range of values of 2


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `ssim_weight` (vae/losses/terms.py)."""
    return "(1 - SSIM)", structural_dissimilarity


def structural_dissimilarity(recon: Images, images: Images) -> PerImage:
    """1 - SSIM of each image, the mean over windows, channels and scales, computed in fp32 at least.

    From 0 for equal images to 2. Scales with a side below a window do not count; the first always does, so
    images need 7 px a side.
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} differs from {tuple(images.shape)}"
    dtype = accumulation_dtype(recon)
    x, y = recon.to(dtype) + 1, images.to(dtype) + 1  # SSIM is defined for values from 0
    scales = [_similarity(x, y)]
    while len(scales) < SCALES and min(x.shape[2:]) >= 2 * WINDOW:
        x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
        scales.append(_similarity(x, y))
    return 1 - torch.stack(scales).mean(0)


def _similarity(x: Tensor, y: Tensor) -> Tensor:
    """SSIM of each image at one scale, (B, 3, H, W) -> (B,)."""
    mean_x, mean_xx, mean_xy = _means(x, x * x, x * y)  # (B, 3, h, w)
    mean_y, mean_yy = _means(y, y * y)
    product = mean_x * mean_y
    squares = mean_x * mean_x + mean_y * mean_y
    contrast = mean_xx + mean_yy - squares
    value = (2 * product + C1) * (2 * (mean_xy - product) + C2) / ((squares + C1) * (contrast + C2))
    return value.flatten(1).mean(1)


def _means(*maps: Tensor) -> tuple[Tensor, ...]:
    """The mean of each map in every complete window."""
    return F.avg_pool2d(torch.cat(maps), WINDOW, stride=1).chunk(len(maps))
