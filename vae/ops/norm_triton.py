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
from vae.ops.library import launch, layout_of
from vae.ops.norm_torch import Norm


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics; h is dense in NHWC or NCHW."""
    out = torch.empty_like(h)
    return out, *_forward(h, norm, out)


def norm_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.norm_statistics; h is dense in NHWC or NCHW."""
    return _forward(h, norm, None)


def _forward(h: Tensor, norm: Norm, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and rstd; `out` gets the normalized h if it is given."""
    run = Launch(h, norm.groups)
    moments = h.new_empty(2, len(h), run.programs, norm.groups, dtype=torch.float32)
    mean, rstd = (h.new_empty(len(h), norm.groups, dtype=torch.float32) for _ in range(2))
    run(kernels.moments_kernel, h, norm.h_bias, moments)
    tensors = (h, norm.h_bias, h if out is None else out, moments, mean, rstd, norm.weight, norm.bias)
    tiles = 0 if out is None else run.tiles_per_program
    run(kernels.normalize_kernel, *tensors, norm.eps, run.programs, tiles, MERGE=True, SILU=norm.silu)
    return mean, rstd


def normalize(h: Tensor, mean: Tensor, rstd: Tensor, norm: Norm) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC or NCHW."""
    run, out = Launch(h, norm.groups), torch.empty_like(h)
    tensors = (h, norm.h_bias, out, mean, mean, rstd, norm.weight, norm.bias)  # no moments
    numbers = (norm.eps, run.programs, run.tiles_per_program)
    run(kernels.normalize_kernel, *tensors, *numbers, MERGE=False, SILU=norm.silu)
    return out


def normalize_backward(
    grad_out: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, norm: Norm, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Implements vae.ops.norm.normalize_backward; grad_out has h's strides."""
    run, parameters = Launch(h, norm.groups), (mean, rstd, norm.weight, norm.bias)
    rows, channels = len(h) * run.programs, h.shape[1]
    sums = [h.new_empty(2, rows, width, dtype=torch.float32) for width in (channels, norm.groups)]
    h_sums = None if norm.h_bias is None else h.new_empty(rows, channels, dtype=torch.float32)
    grad_weight, grad_bias = (h.new_empty(channels, dtype=torch.float32) for _ in range(2))
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    run(kernels.sums_kernel, grad_out, h, norm.h_bias, *parameters, *sums, SILU=norm.silu)
    tensors = (grad_out, h, norm.h_bias, grad_h, *parameters, *sums, grad_weight, grad_bias, h_sums)
    run(kernels.input_gradient_kernel, *tensors, SILU=norm.silu)
    return grad_h, grad_weight, grad_bias, None if h_sums is None else h_sums.sum(0)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Implements vae.ops.norm.add_with_bias; h is dense in NHWC or NCHW."""
    run = Launch(h, groups=h.shape[1])  # tiles of any channels
    run(kernels.add_kernel, h, x.contiguous(memory_format=layout_of(h)), bias)
    return h


class Launch:
    """Launches kernels on h (B, C, H, W): how it is cut, and the arguments that all kernels end with."""

    def __init__(self, h: Tensor, groups: int):
        batch, channels, height, width = h.shape
        pixels, channels_last = height * width, not h.is_contiguous()
        blocks = norm_blocks(batch, channels, pixels, groups, channels_last)
        strides = (channels * pixels, channels, 1) if channels_last else (channels * pixels, 1, pixels)
        self.programs, self.tiles_per_program = blocks.programs, blocks.tiles_per_program
        self._grid = (blocks.programs, blocks.column_blocks, batch)
        constants = (blocks.channels, blocks.rows, blocks.columns, blocks.groups)
        self._numbers = (pixels, channels, groups, *strides, blocks.tiles_per_program, *constants)

    def __call__(self, kernel: Any, *arguments: Any, **constants: bool) -> None:
        """`constants`: what the kernel has after the common arguments, in its order."""
        numbers = (*self._numbers, *constants.values())
        launch(kernel, self._grid, gpu_blocks.NUM_WARPS, *arguments, *numbers)
