"""Scale equivariance: smaller latents are decoded to smaller images (arXiv 2502.14831).

With turns, they are decoded to turned images as well, as in EQ-VAE (arXiv 2502.09509), which draws any scale
from 1/4 on and turns all latents alike. Here every step has both scales, so its shapes never change.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vae.config.options import MIN_VIEW, LossConfig
from vae.losses.terms import TermFunction

SCALES = (2, 4)  # the paper's


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `equivariance_weight` (vae/losses/terms.py)."""
    label = "equivariance to scale and quarter turns" if loss.equivariance_turns else "equivariance to scale"
    return label, partial(smaller, with_turns=loss.equivariance_turns)


def smaller(x: Tensor, unit: int, side: int, turns: Tensor | None, *, with_turns: bool) -> list[Tensor]:
    """Area-reduced `x` (B, C, H, W), once for each scale whose images have MIN_VIEW px.

    `x` has `unit` values for each position of the latent along a side (1: latents); `side`: px of a position.
    `turns` (B,): quarter turns of each image, used if `with_turns`; other shapes than squares turn by halves.
    """
    results = []
    for scale in SCALES:
        sizes = [length // unit // scale * unit for length in x.shape[2:]]
        if min(sizes) * side >= MIN_VIEW * unit:
            part = F.avg_pool2d(x[..., : sizes[0] * scale, : sizes[1] * scale], scale)
            results.append(_turned(part, turns) if with_turns and turns is not None else part)
    return results


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Each of `x` (B, C, H, W) turned by `turns` (B,) quarters, without reading them back."""
    turns = turns[:, None, None, None]
    x = torch.where(turns >= 2, x.rot90(2, (2, 3)), x)
    if x.shape[2] != x.shape[3]:
        return x
    return torch.where(turns % 2 == 1, x.rot90(1, (2, 3)), x)
