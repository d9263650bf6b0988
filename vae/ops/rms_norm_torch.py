"""RMS norm(+SiLU) from PyTorch operations, one part of the tensor at a time, in at least fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.library import accumulation_dtype
from vae.ops.norm_torch import Norm, Part, parts_of

MIN_LENGTH = 1e-12  # of the channels of a pixel, as in torch.nn.functional.normalize


def rms_normalize(h: Tensor, norm: Norm) -> Tensor:
    """Implements vae.ops.rms_norm.rms_normalize."""
    out = torch.empty_like(h, dtype=norm.out_dtype)
    weight = norm.weight.to(accumulation_dtype(h))[:, None, None]
    for part in parts_of(h):
        unit, _ = _unit(h, norm, part)
        values = unit.mul_(weight)
        out[part] = F.silu(values, inplace=True) if norm.silu else values
    return out


def rms_normalize_backward(
    grad_out: Tensor, h: Tensor, norm: Norm, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Implements vae.ops.rms_norm.rms_normalize_backward."""
    grad_h = grad_out if in_place else torch.empty_like(h)  # each part is read before it is written
    weight = norm.weight.to(accumulation_dtype(h))[:, None, None]
    weight_sums, h_sums = h.new_zeros(2, h.shape[1], dtype=torch.float64)
    for part in parts_of(h):
        unit, scale = _unit(h, norm, part)
        grad = grad_out[part].to(unit.dtype)
        if norm.silu:
            grad = torch.ops.aten.silu_backward(grad, unit * weight)
        products = unit * grad
        weight_sums += products.sum((0, 2, 3))
        means = products.mul_(weight).mean(1, keepdim=True)
        values = (grad * weight).sub_(unit.mul_(means)).mul_(scale)
        grad_h[part] = values
        if norm.h_bias is not None:
            h_sums += values.sum((0, 2, 3))
    dtype = norm.weight.dtype
    return grad_h, weight_sums.to(dtype), None if norm.h_bias is None else h_sums.to(dtype)


def _unit(h: Tensor, norm: Norm, part: Part) -> tuple[Tensor, Tensor]:
    """A new tensor with mean square 1 over the channels, and the factor (b, 1, rows, W) that scaled it."""
    x = h[part].to(accumulation_dtype(h), copy=True)
    if norm.h_bias is not None:
        x += norm.h_bias.to(x.dtype)[:, None, None]
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(MIN_LENGTH)
    scale = length.reciprocal_().mul_(h.shape[1] ** 0.5)
    return x.mul_(scale), scale
