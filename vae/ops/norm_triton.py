"""GroupNorm(+SiLU) on a GPU, in channels_last layout: launches the kernels of vae.ops.norm_kernels.

Memory bandwidth bounds these operations, so memory traffic decides their speed: forward reads h twice and
writes once, backward reads h and grad_out twice and writes once, with two launches each. The 32 groups of one
image do not fill a GPU. Each reduction is therefore split over many programs along the pixels. All arithmetic
is fp32, all offsets are 64 bits. The speed is not measured yet.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vae.ops import gpu_blocks
from vae.ops import norm_kernels as kernels
from vae.ops.library import MAX_COMPILED_KERNELS, launch, processors
from vae.ops.norm_torch import Norm, sums_width


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics; h is dense in NHWC."""
    cut, batch, out = _cut(h, norm.groups), h.shape[0], torch.empty_like(h, dtype=norm.out_dtype)
    moments = h.new_empty(2, batch, cut.programs, norm.groups, dtype=torch.float32)
    statistics = h.new_empty(2, batch, norm.groups, dtype=torch.float32)
    _run(kernels.moments_kernel, cut, (h, norm.h_bias, moments), cut.numbers)
    tensors = (h, norm.h_bias, out, moments, statistics, norm.weight, norm.bias)
    numbers = (norm.eps, *cut.numbers, norm.silu)
    _run(kernels.normalize_kernel, cut, tensors, numbers)
    return out, statistics


def normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC."""
    cut, out = _cut(h, norm.groups), torch.empty_like(h, dtype=norm.out_dtype)
    tensors = (h, norm.h_bias, out, None, statistics, norm.weight, norm.bias)
    numbers = (norm.eps, *cut.numbers, norm.silu)
    _run(kernels.normalize_kernel, cut, tensors, numbers)
    return out


def normalize_backward(
    grad_out: Tensor, h: Tensor, statistics: Tensor, norm: Norm, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Implements vae.ops.norm.normalize_backward; grad_out has h's strides."""
    cut, h_bias, parameters = _cut(h, norm.groups), norm.h_bias, (statistics, norm.weight, norm.bias)
    sums = h.new_empty(h.shape[0] * cut.programs, sums_width(h, norm), dtype=torch.float32)
    grad_weight = torch.empty_like(norm.weight, dtype=torch.float32)
    grad_bias = torch.empty_like(grad_weight)
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    numbers = (*cut.numbers, norm.silu)
    inputs = (grad_out, h, h_bias, *parameters, sums)
    _run(kernels.sums_kernel, cut, inputs, numbers)
    tensors = (grad_out, h, h_bias, grad_h, *parameters, sums, grad_weight, grad_bias)
    _run(kernels.input_gradient_kernel, cut, tensors, numbers)
    return grad_h, grad_weight, grad_bias, None if h_bias is None else sums[:, -h.shape[1] :].sum(0)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Implements vae.ops.norm.add_with_bias; h is dense in NHWC."""
    cut = _cut(h, groups=h.shape[1])  # tiles of any channels
    tensors = (h, x.contiguous(memory_format=torch.channels_last), bias)
    _run(kernels.add_kernel, cut, tensors, cut.numbers)
    return h


class Cut(NamedTuple):
    """How kernels cut a tensor, and the numbers that all of them get."""

    programs: int  # along the pixels
    grid: tuple[int, int, int]
    num_warps: int
    numbers: tuple[int, ...]


def _cut(h: Tensor, groups: int) -> Cut:
    """The cut of h (B, C, H, W)."""
    assert h.is_contiguous(memory_format=torch.channels_last)
    total = gpu_blocks.reduction_programs(processors(h.get_device()))
    constants = (gpu_blocks.TILE_ELEMENTS, gpu_blocks.COLUMNS)
    return _cut_of(h.shape, groups, total, gpu_blocks.NUM_WARPS, constants)


def _run(
    kernel: triton.JITFunction, cut: Cut, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
) -> None:
    launch(kernel, cut.grid, cut.num_warps, tensors, numbers, gpu_blocks.MAX_REGISTERS)


@lru_cache(MAX_COMPILED_KERNELS)
def _cut_of(shape: torch.Size, groups: int, total: int, num_warps: int, constants: tuple[int, ...]) -> Cut:
    """`total`: programs. `constants`: what norm_blocks reads. Benchmarks and tests change them."""
    batch, channels, height, width = shape
    blocks = gpu_blocks.norm_blocks(batch, channels, height * width, groups, total)
    sizes = (blocks.channels, blocks.rows, blocks.columns, blocks.groups)
    numbers = (height * width, channels, groups, blocks.tiles_per_program, *sizes)
    return Cut(blocks.programs, (blocks.programs, blocks.column_blocks, batch), num_warps, numbers)
