"""GroupNorm, alone and followed by SiLU, in the dtype of its input with fp32 statistics."""

import torch
import torch.nn.functional as F


def group_norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """Normalise h (B, C, H, W) over each of `groups` channel groups of each image (Wu & He, 2018).

    Statistics are taken in fp32 by the kernels whatever the dtype of h, the result has h's dtype.
    """
    return F.group_norm(h, groups, weight.to(h.dtype), bias.to(h.dtype), eps)


def group_norm_silu(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """SiLU of group_norm: the activation in front of every convolution of the network."""
    return F.silu(group_norm(h, weight, bias, groups, eps))
