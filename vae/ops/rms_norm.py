"""RMS norm over the channels of each pixel (Zhang & Sennrich, 2019), alone and followed by SiLU.

`Norm` describes it: without a bias, and without groups. There are no statistics to save: backward recomputes
the length of each pixel's channels. Shapes as in vae.ops.
"""

from types import ModuleType

import torch
from torch import Tensor

from vae.ops import rms_norm_torch
from vae.ops.gpu_blocks import MAX_RMS_CHANNELS, reduction_programs, rms_blocks
from vae.ops.library import accumulation_dtype, has_no_data, kernel_module, uses_triton
from vae.ops.norm_torch import Norm


def rms_norm_reference(h: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """h (B, C, H, W) / its length over C * sqrt(C) * weight (C,), then SiLU, in the dtype of h."""
    unit = torch.nn.functional.normalize(h, dim=1) * h.shape[1] ** 0.5
    scaled = unit * weight.to(h.dtype)[:, None, None]
    return scaled * scaled.sigmoid() if silu else scaled


def rms_normalize(h: Tensor, norm: Norm) -> Tensor:
    """rms_norm_reference of h + h_bias, in norm's dtype and h's layout; it computes in at least fp32."""
    if has_no_data(h):
        return torch.empty_like(h, dtype=norm.out_dtype)
    return backend(h).rms_normalize(h, norm)


def rms_normalize_backward(
    grad_out: Tensor, h: Tensor, norm: Norm, in_place: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of h, weight and h_bias; with `in_place`, the first overwrites grad_out.

    grad_out has h's layout.
    """
    if not has_no_data(h):
        return backend(h).rms_normalize_backward(grad_out, h, norm, in_place)
    blocks = rms_blocks(h.shape[1], h.numel() // h.shape[1], reduction_programs())
    columns = h.shape[1] * (1 if norm.h_bias is None else 2)
    sums = h.new_empty(blocks.programs, columns, dtype=accumulation_dtype(h))  # noqa: F841 - counted
    grad_h = grad_out if in_place else torch.empty_like(h)
    weight = torch.empty_like(norm.weight)
    return grad_h, weight, None if norm.h_bias is None else torch.empty_like(weight)


def backend(h: Tensor) -> ModuleType:
    """The module that computes RMS norms of h: Triton kernels on a GPU if possible, else PyTorch."""
    if h.shape[1] <= MAX_RMS_CHANNELS and uses_triton("rms_norm", h):
        return kernel_module("vae.ops.rms_norm_triton")
    return rms_norm_torch
