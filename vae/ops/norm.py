"""GroupNorm (Wu & He, 2018), alone and followed by SiLU, in the dtype of its input with fp32 statistics.

Only the input and the statistics are saved: the normalised value is made again in backward.
G groups of channels; the shapes are those of vae.ops.
"""

import importlib
from types import ModuleType

import torch

from vae.ops import norm_torch as norm_torch
from vae.ops.gpu_blocks import norm_blocks
from vae.ops.layout import accumulation_dtype, layout_of
from vae.ops.library import define_op, has_no_data, triton_is_installed


def group_norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """Normalise h (B, C, H, W) over each of `groups` channel groups of each image.

    Statistics are fp32 (fp64 for fp64) whatever the dtype of h; the result has h's dtype and layout.
    """
    return _norm_op(h, weight, bias, groups, eps, False)[0]


def group_norm_silu(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """SiLU of group_norm: the activation in front of every convolution of the network."""
    return _norm_op(h, weight, bias, groups, eps, True)[0]


def norm_statistics(h: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1/sqrt(variance + eps) of each group of each image: (B, G) each, fp32 (fp64 for fp64)."""
    h = _dense(h)
    if has_no_data(h):
        partial = _partial_results(h)  # noqa: F841 - alive as long as on a GPU
        return tuple(h.new_empty(h.shape[0], groups, dtype=accumulation_dtype(h)) for _ in range(2))
    return _kernels(h).statistics(h, groups, eps)


def normalize(
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    silu: bool,
) -> torch.Tensor:
    """(h - mean) * rstd * weight + bias, then SiLU where asked for, in h's dtype and memory layout."""
    h = _dense(h)
    if has_no_data(h):
        return torch.empty_like(h)
    return _kernels(h).forward(h, mean, rstd, weight, bias, silu)


def normalize_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    silu: bool,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of h (its dtype and layout), weight and bias (theirs, summed in fp32 at least).

    `mean` and `rstd` count as functions of h, as norm_statistics makes them. With `in_place` the gradient
    of h is written over grad_out, which then belongs to this call.
    """
    h = _dense(h)
    grad_out = grad_out.contiguous(memory_format=layout_of(h))
    if has_no_data(h):
        partial = _partial_results(h)  # noqa: F841 - alive as long as on a GPU
        grad_h = grad_out if in_place else torch.empty_like(h)
        return grad_h, torch.empty_like(weight), torch.empty_like(bias)
    backward = _kernels(h).backward
    grad_h, grad_weight, grad_bias = backward(grad_out, h, mean, rstd, weight, bias, silu, in_place)
    return grad_h, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def group_norm_reference(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float, silu: bool
) -> torch.Tensor:
    """What the operations compute, written out in the dtype of h."""
    grouped = h.unflatten(1, (groups, -1))  # (B, G, C/G, H, W)
    variance, mean = torch.var_mean(grouped, dim=(2, 3, 4), correction=0, keepdim=True)
    unit = ((grouped - mean) / (variance + eps).sqrt()).flatten(1, 2)
    affine = unit * weight[:, None, None] + bias[:, None, None]
    return affine * affine.sigmoid() if silu else affine


def _kernels(h: torch.Tensor) -> ModuleType:
    """The module that computes for h: Triton kernels on a GPU that has them, else stock operations."""
    if h.device.type == "cuda" and h.dtype != torch.float64 and triton_is_installed():
        return importlib.import_module("vae.ops.norm_triton")
    return norm_torch


def _dense(h: torch.Tensor) -> torch.Tensor:
    """h without gaps: itself, or a channels_last copy of an odd view."""
    return h if h.is_contiguous() else h.contiguous(memory_format=torch.channels_last)


def _partial_results(h: torch.Tensor) -> torch.Tensor | None:
    """Scratch of the kernels' split reductions: two values for each channel and block of pixels."""
    if not h.is_meta:
        return None  # torch.compile traces: its sizes may be symbols
    batch, channels, height, width = h.shape
    blocks = norm_blocks(batch, channels, height * width, channels_last=not h.is_contiguous())
    return h.new_empty(2, batch, blocks.programs, channels, dtype=accumulation_dtype(h))


def _norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = norm_statistics(h, groups, eps)
    return normalize(h, mean, rstd, weight, bias, groups, silu), mean, rstd


def _norm_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normalize_backward(grad_out, h, mean, rstd, weight, bias, groups, silu)


def _save_for_backward(ctx, inputs, output):
    h, weight, bias, ctx.groups, _, ctx.silu = inputs
    ctx.save_for_backward(h, output[1], output[2], weight, bias)


def _gradients(ctx, grad_out, grad_mean, grad_rstd):
    return *_norm_backward_op(grad_out, *ctx.saved_tensors, ctx.groups, ctx.silu), None, None, None


_norm_backward_op = define_op(_norm_backward, _norm_backward)
_norm_op = define_op(_norm, _norm, _gradients, _save_for_backward)
