"""GroupNorm(+SiLU) on a GPU, in channels_last layout: launches the kernels of vae.ops.norm_kernels.

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
from vae.ops.library import launch
from vae.ops.norm_torch import Norm, sums_width


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics; h is dense in NHWC."""
    run, out = Launch(h, norm.groups), torch.empty_like(h)
    moments = h.new_empty(2, h.shape[0], run.programs, norm.groups, dtype=torch.float32)
    statistics = h.new_empty(2, h.shape[0], norm.groups, dtype=torch.float32)
    run(kernels.moments_kernel, h, norm.h_bias, moments)
    tensors = (h, norm.h_bias, out, moments, statistics, norm.weight, norm.bias)
    run(kernels.normalize_kernel, *tensors, norm.eps, silu=norm.silu)
    return out, statistics


def normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC."""
    out = torch.empty_like(h)
    tensors = (h, norm.h_bias, out, None, statistics.contiguous(), norm.weight, norm.bias)
    Launch(h, norm.groups)(kernels.normalize_kernel, *tensors, norm.eps, silu=norm.silu)
    return out


def normalize_backward(
    grad_out: Tensor, h: Tensor, statistics: Tensor, norm: Norm, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Implements vae.ops.norm.normalize_backward; grad_out has h's strides."""
    run, parameters = Launch(h, norm.groups), (statistics.contiguous(), norm.weight, norm.bias)
    columns = sums_width(h, norm)
    sums = h.new_empty(h.shape[0] * run.programs, columns, dtype=torch.float32)
    grad_weight, grad_bias = (h.new_empty(h.shape[1], dtype=torch.float32) for _ in range(2))
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    run(kernels.sums_kernel, grad_out, h, norm.h_bias, *parameters, sums, silu=norm.silu)
    tensors = (grad_out, h, norm.h_bias, grad_h, *parameters, sums, grad_weight, grad_bias)
    run(kernels.input_gradient_kernel, *tensors, silu=norm.silu)
    return grad_h, grad_weight, grad_bias, None if norm.h_bias is None else sums[:, -h.shape[1] :].sum(0)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Implements vae.ops.norm.add_with_bias; h is dense in NHWC."""
    run = Launch(h, groups=h.shape[1])  # tiles of any channels
    run(kernels.add_kernel, h, x.contiguous(memory_format=torch.channels_last), bias)
    return h


class Launch:
    """Launches kernels on h (B, C, H, W): how it is cut, and the arguments that all kernels have."""

    def __init__(self, h: Tensor, groups: int):
        batch, channels, height, width = h.shape
        assert h.is_contiguous(memory_format=torch.channels_last)
        blocks = norm_blocks(batch, channels, height * width, groups)
        self.programs = blocks.programs
        self._grid = (blocks.programs, blocks.column_blocks, batch)
        constants = (blocks.channels, blocks.rows, blocks.columns, blocks.groups)
        self._numbers = (height * width, channels, groups, blocks.tiles_per_program, *constants)

    def __call__(self, kernel: Any, *arguments: Any, silu: bool | None = None) -> None:
        """`silu`: the last argument of some kernels."""
        last = () if silu is None else (silu,)
        launch(kernel, self._grid, gpu_blocks.NUM_WARPS, *arguments, *self._numbers, *last)
