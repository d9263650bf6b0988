"""Structural similarity of reconstructions over 8-bit values, as images are displayed; one number per image.

Shapes: B images of H x W px, three channels, floats in [-1, 1].
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.images.psnr import PEAK, to_8_bit

SSIM_WINDOW = 11  # px; Wang et al. 2004: an 11 x 11 Gaussian with standard deviation 1.5
SSIM_SIGMA = 1.5
SSIM_C1 = (0.01 * PEAK) ** 2
SSIM_C2 = (0.03 * PEAK) ** 2
_GAUSSIAN = [math.exp(-0.5 * ((i - SSIM_WINDOW // 2) / SSIM_SIGMA) ** 2) for i in range(SSIM_WINDOW)]
WEIGHTS = [weight / sum(_GAUSSIAN) for weight in _GAUSSIAN]  # of the window along a side
# Wang, Simoncelli & Bovik 2003, from the full size to the smallest scale
MS_SSIM_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
MS_SSIM_MIN_SIDE = SSIM_WINDOW * 2 ** (len(MS_SSIM_WEIGHTS) - 1)  # px: one window at the smallest scale


def ssim(recon: Tensor, images: Tensor) -> Tensor:
    """Structural similarity of each image (Wang et al. 2004) over 8-bit values: -> (B,) fp64.

    Gaussian window, mean over channels, population covariance. Only windows that are completely inside the
    image count, so its outer 5 px are never a window's centre. scikit-image computes the same with
    `gaussian_weights=True, use_sample_covariance=False`; torchmetrics does not. No side is below 11 px.
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} is not {tuple(images.shape)}"
    assert min(images.shape[2:]) >= SSIM_WINDOW, tuple(images.shape)
    values = []
    # one channel at a time, to save memory
    for x, y in zip(recon.flatten(0, 1), images.flatten(0, 1), strict=True):
        values.append(_ssim_of_channel(to_8_bit(x).double(), to_8_bit(y).double())[0])
    return torch.stack(values).view(images.shape[:2]).mean(1)


def ms_ssim(recon: Tensor, images: Tensor) -> Tensor:
    """Structural similarity over five scales (Wang, Simoncelli & Bovik 2003) of each image: -> (B,) fp64.

    Every scale is computed as in `ssim`. The next scale is a 2 x 2 mean, which drops an odd last row or
    column. As in pytorch-msssim, the result is the mean over channels of each channel's weighted product,
    with negative factors as 0. No side is below 176 px.
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} is not {tuple(images.shape)}"
    assert min(images.shape[2:]) >= MS_SSIM_MIN_SIDE, tuple(images.shape)
    x, y = to_8_bit(recon).double(), to_8_bit(images).double()
    product = torch.ones(images.shape[:2], dtype=torch.float64, device=images.device)  # (B, 3)
    for scale, weight in enumerate(MS_SSIM_WEIGHTS):
        last = scale == len(MS_SSIM_WEIGHTS) - 1
        parts = [_ssim_of_channel(a, b) for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)]
        values = torch.stack([whole if last else structure for whole, structure in parts])
        product = product * values.view(images.shape[:2]).clamp(min=0) ** weight
        if not last:
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    return product.mean(1)


def _ssim_of_channel(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Structural similarity of two (H, W) channels, and its contrast and structure factors alone.

    Both are fp64, because variances are differences of large numbers.
    """
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x = _blur(x * x) - mean_x * mean_x
    variance_y = _blur(y * y) - mean_y * mean_y
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + SSIM_C1) / (mean_x * mean_x + mean_y * mean_y + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (variance_x + variance_y + SSIM_C2)
    return (luminance * structure).mean(), structure.mean()


def _blur(channel: Tensor) -> Tensor:
    """Weighted mean over every complete window: (H, W) -> (H + 1 - window, W + 1 - window)."""
    for dim in (0, 1):
        # shifted sums, because on a CPU an fp64 conv2d unfolds the image 11 times
        length = channel.shape[dim] - SSIM_WINDOW + 1
        blurred = channel.narrow(dim, 0, length) * WEIGHTS[0]
        for offset in range(1, SSIM_WINDOW):
            blurred.add_(channel.narrow(dim, offset, length), alpha=WEIGHTS[offset])
        channel = blurred
    return channel
