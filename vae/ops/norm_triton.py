"""GroupNorm(+SiLU) on a GPU, in NHWC or NCHW: launches the kernels of vae.ops.norm_kernels.

Memory bandwidth bounds these operations, so memory traffic decides their speed: forward reads h twice and
writes once, backward reads h and grad_out twice and writes once, with two launches each. The 32 groups of one
image do not fill a GPU. Each reduction is therefore split over many programs along the pixels. All arithmetic
is fp32, all offsets are 64 bits. The speed is not measured yet.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from typing import Any

import torch
from torch import Tensor

from vae.ops import gpu_blocks
from vae.ops import norm_kernels as kernels
from vae.ops.gpu_blocks import norm_blocks
from vae.ops.library import on_input_device


@on_input_device
def normalize_with_statistics(
    h: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics; h is dense in NHWC or NCHW."""
    out = torch.empty_like(h)
    return out, *_forward(h, out, weight, bias, groups, eps, silu)


@on_input_device
def norm_statistics(h: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.norm_statistics; h is dense in NHWC or NCHW."""
    return _forward(h, None, h, h, groups, eps, False)


def _forward(
    h: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Mean and rstd; `out` gets the normalized h if it is given."""
    launch = Launch(h, groups)
    moments = h.new_empty(2, len(h), launch.programs, groups, dtype=torch.float32)
    mean, rstd = (h.new_empty(len(h), groups, dtype=torch.float32) for _ in range(2))
    launch(kernels.moments_kernel, h, moments)
    tensors = (h, h if out is None else out, moments, mean, rstd, weight, bias)
    tiles = 0 if out is None else launch.tiles_per_program
    launch(kernels.normalize_kernel, *tensors, eps, launch.programs, tiles, MERGE=True, SILU=silu)
    return mean, rstd


@on_input_device
def normalize(h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC or NCHW."""
    launch, out = Launch(h, mean.shape[1]), torch.empty_like(h)
    tensors = (h, out, mean, mean, rstd, weight, bias)  # no moments
    numbers = (0.0, launch.programs, launch.tiles_per_program)
    launch(kernels.normalize_kernel, *tensors, *numbers, MERGE=False, SILU=silu)
    return out


@on_input_device
def normalize_backward(
    grad_out: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    silu: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_backward; grad_out has h's strides."""
    launch, norm = Launch(h, mean.shape[1]), (mean, rstd, weight, bias)
    sums = [
        h.new_empty(2, len(h), launch.programs, width, dtype=torch.float32)
        for width in (h.shape[1], mean.shape[1])
    ]
    grad_weight, grad_bias = (h.new_empty(h.shape[1], dtype=torch.float32) for _ in range(2))
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    launch(kernels.sums_kernel, grad_out, h, *norm, *sums, SILU=silu)
    gradients = (*norm, *sums, grad_weight, grad_bias)
    launch(kernels.input_gradient_kernel, grad_out, h, grad_h, *gradients, SILU=silu)
    return grad_h, grad_weight, grad_bias


class Launch:
    """Launches kernels on h (B, C, H, W): how it is cut, and the arguments that all kernels end with."""

    def __init__(self, h: Tensor, groups: int):
        batch, channels, height, width = h.shape
        pixels, channels_last = height * width, not h.is_contiguous()
        blocks = norm_blocks(batch, channels, pixels, groups, channels_last)
        strides = (channels * pixels, channels, 1) if channels_last else (channels * pixels, 1, pixels)
        self.programs, self.tiles_per_program = blocks.programs, blocks.tiles_per_program
        self._grid = (blocks.programs, blocks.column_blocks, batch)
        self._numbers = (pixels, channels, groups, *strides, blocks.tiles_per_program)
        self.constants = {
            "BLOCK": blocks.channels,
            "ROWS": blocks.rows,
            "COLUMNS": blocks.columns,
            "GROUPS": blocks.groups,
            "num_warps": gpu_blocks.NUM_WARPS,
        }

    def __call__(self, kernel: Any, *arguments: Tensor | float, **constants: bool) -> None:
        kernel[self._grid](*arguments, *self._numbers, **self.constants, **constants)
