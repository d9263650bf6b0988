"""Scale equivariance: smaller latents are decoded to smaller images (arXiv 2502.14831).

Every step has both scales, so its shapes never change.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.config.options import MIN_VIEW, LossConfig
from vae.losses.terms import TermFunction

SCALES = (2, 4)  # the paper's


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `equivariance_weight` (vae/losses/terms.py)."""
    return "equivariance to scale", smaller


def smaller(x: Tensor, unit: int, side: int) -> list[Tensor]:
    """Area-reduced `x` (B, C, H, W), once for each scale whose images have MIN_VIEW px.

    `x` has `unit` values for each position of the latent along a side (1: latents); `side`: px of a position.
    """
    results = []
    for scale in SCALES:
        sizes = [length // unit // scale * unit for length in x.shape[2:]]
        if min(sizes) * side >= MIN_VIEW * unit:
            results.append(F.avg_pool2d(x[..., : sizes[0] * scale, : sizes[1] * scale], scale))
    return results
