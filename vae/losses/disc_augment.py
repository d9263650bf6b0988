"""Augmentations of what the discriminator sees, the same for an image and its reconstruction.

Colour, shift and cutout of DiffAugment (Zhao et al. 2020), from draws that are an input of the step.
"""

import torch
from torch import Tensor

from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Images

DRAWS = 7  # per image: brightness, saturation, contrast, shift down and right, centre of the cutout
SHIFT = 0.125  # of the side, at most, as in the paper
CUTOUT = 0.5  # side of the square, as a fraction of the image's


def augmented(images: Images, draws: Tensor) -> Images:
    """Clamped to [-1, 1] and changed as `draws` (B, DRAWS), uniform in [0, 1], say; differentiable."""
    dtype = accumulation_dtype(images)  # contrast of a dark image is lost in bf16
    brightness, saturation, contrast, *places = draws.to(dtype).T[..., None, None, None]
    x = images.to(dtype).clamp(-1, 1) + (brightness - 0.5)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * (2 * saturation)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * (contrast + 0.5)
    kept = torch.zeros((), dtype=torch.bool, device=x.device)
    for dim, shift, centre in zip((2, 3), places[:2], places[2:], strict=True):
        size = x.shape[dim]
        line = torch.arange(size, device=x.device).view((1, 1, -1, 1) if dim == 2 else (1, 1, 1, -1))
        source = line + ((2 * shift.float() - 1) * SHIFT * size).round().long()
        is_inside = (source >= 0) & (source < size)
        x = x.take_along_dim(source.clamp(0, size - 1), dim) * is_inside
        kept = kept | ((line - centre.float() * size).abs() > CUTOUT / 2 * size)
    return (x * kept).to(images.dtype)
