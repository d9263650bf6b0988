"""GroupNorm (Wu & He, 2018), alone and followed by SiLU, in the dtype of its input with fp32 statistics.

Without a bias, all operations compute the RMS norm of vae.ops.rms_norm; its statistics are empty.

Only the input and the statistics are saved: backward recomputes the normalized values. Shapes as in vae.ops;
G: groups of channels.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vae.ops import norm_torch
from vae.ops.gpu_blocks import norm_blocks, reduction_programs
from vae.ops.library import (
    accumulation_dtype,
    has_no_data,
    kernel_module,
    layout_of,
    once_differentiable,
    uses_triton,
)
from vae.ops.norm_torch import Norm, sums_width
from vae.ops.rms_norm import rms_normalize, rms_normalize_backward


def group_norm(h: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """Normalize h (B, C, H, W) over each of `groups` channel groups of each image.

    Statistics are fp32 (fp64 if h is fp64) in every dtype of h. The result has h's dtype and layout.
    """
    return _GroupNorm.apply(h, weight, bias, groups, eps, False)


def group_norm_silu(h: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """SiLU of group_norm: the activation before most convolutions of the network."""
    return _GroupNorm.apply(h, weight, bias, groups, eps, True)


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The normalized h (see `normalize`), and mean and 1/sqrt(variance + eps) of each group of each image.

    The statistics are (2, B, G), fp32 (fp64 if h is fp64).
    """
    h = _dense(h)
    if norm.bias is None:
        return rms_normalize(h, norm), h.new_empty(0)
    if not has_no_data(h):
        return backend(h).normalize_with_statistics(h, norm)
    partial = _partial_results(h, norm, 2 * norm.groups)  # noqa: F841 - counted until this function returns
    out = torch.empty_like(h, dtype=norm.out_dtype)
    return out, h.new_empty(2, len(h), norm.groups, dtype=accumulation_dtype(h))


def normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    """(h + h_bias - mean) * rstd * weight + bias, then SiLU if requested, in norm's dtype and h's layout."""
    h = _dense(h)
    if norm.bias is None:
        return rms_normalize(h, norm)
    if has_no_data(h):
        return torch.empty_like(h, dtype=norm.out_dtype)
    return backend(h).normalize(h, statistics, norm)


def normalize_backward(
    grad_out: Tensor, h: Tensor, statistics: Tensor, norm: Norm, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of h (in its dtype and layout), weight, bias and h_bias (in their dtypes, from sums in fp32).

    The gradient of h includes the paths through the statistics. With `in_place` it overwrites grad_out, and
    the caller must not use grad_out again.
    """
    h = _dense(h)
    grad_out = grad_out.contiguous(memory_format=layout_of(h))
    if norm.bias is None:
        grad_h, weight, h_bias = rms_normalize_backward(grad_out, h, norm, in_place)
        return grad_h, weight, None, h_bias
    if has_no_data(h):
        partial = _partial_results(h, norm, sums_width(h, norm))  # noqa: F841 - counted until this function returns
        grad_h = grad_out if in_place else torch.empty_like(h)
        weight, bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
        h_bias = None if norm.h_bias is None else torch.empty_like(bias)
    else:
        grad_h, weight, bias, h_bias = backend(h).normalize_backward(grad_out, h, statistics, norm, in_place)
    dtype = norm.weight.dtype
    return grad_h, weight.to(dtype), bias.to(dtype), None if h_bias is None else h_bias.to(dtype)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Add x, in h's shape, and the bias (C,) to h; return h."""
    return h if has_no_data(h) else backend(h).add_with_bias(h, x, bias)


def group_norm_reference(
    h: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """The formula of the operations, computed in the dtype of h."""
    grouped = h.unflatten(1, (groups, -1))  # (B, G, C/G, H, W)
    variance, mean = torch.var_mean(grouped, dim=(2, 3, 4), correction=0, keepdim=True)
    unit = ((grouped - mean) / (variance + eps).sqrt()).flatten(1, 2)
    affine = unit * weight[:, None, None] + bias[:, None, None]
    return affine * affine.sigmoid() if silu else affine


def backend(h: Tensor) -> ModuleType:
    """The module that computes norms of h: Triton kernels on a GPU if possible, else PyTorch operations."""
    if uses_triton("norm", h):
        return kernel_module("vae.ops.norm_triton")
    return norm_torch


def _dense(h: Tensor) -> Tensor:
    """h if it is contiguous, else h in channels_last layout; copied only if it has neither layout."""
    return h if h.is_contiguous() else h.contiguous(memory_format=torch.channels_last)


def _partial_results(h: Tensor, norm: Norm, columns: int) -> Tensor:
    """The kernels' partial sums, without data: `columns` of each program."""
    batch, channels, height, width = h.shape
    blocks = norm_blocks(batch, channels, height * width, norm.groups, reduction_programs())
    return h.new_empty(batch, blocks.programs, columns, dtype=accumulation_dtype(h))


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
    ) -> Tensor:
        out, statistics = normalize_with_statistics(h, Norm(weight, bias, groups, eps, silu))
        ctx.save_for_backward(h, statistics, weight, bias)
        ctx.numbers = groups, eps, silu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, statistics, weight, bias = ctx.saved_tensors
        norm = Norm(weight, bias, *ctx.numbers)
        return *normalize_backward(grad_out, h, statistics, norm)[:3], None, None, None
