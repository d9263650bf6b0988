"""GroupNorm(+SiLU) on a GPU, in channels_last layout: Triton kernels.

Memory bandwidth bounds these operations, so memory traffic decides their speed: forward reads h twice and
writes once, backward reads h and grad_out twice and writes once, with two launches each. The 32 groups of one
image do not fill a GPU. Each reduction is therefore split over many programs along the pixels. All arithmetic
is fp32, all offsets are 64 bits. The speed is not measured yet.

A program processes several tiles, one after another, of one image and one block of channels that contains
whole groups. A tile is some pixels (rows) of these channels (columns). Sums over tiles are kept per element
of a tile and reduced once, after the loop. The loads of a tile start two tiles earlier. Each program of the
second kernel merges the partial results that it needs itself, so no third kernel is launched in between.
`unit` is (h + h_bias - mean) * rstd; h_bias may be None. `has_c` and `has_g` mark the channels and groups
that exist.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

# Triton reads the annotations of kernels: only `constexpr` parameters have one.
# mypy: disallow-incomplete-defs=False
# ruff: noqa: N803, N806 - constexpr names are uppercase, as in Triton's own kernels

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vae.ops.library import (
    MAX_COMPILED_KERNELS,
    MAX_REGISTERS,
    NUM_WARPS,
    launch,
    norm_blocks,
    processors,
    reduction_programs,
)
from vae.ops.norm import Norm, sums_width

STAGES = tl.constexpr(3)  # two tiles of each tensor in flight: 64 KiB for two tensors in fp32


@triton.jit
def _block(channels, groups, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """Channels and groups of this program, which of them exist, and which channel is in which group."""
    own_c, own_g, group_channels = tl.arange(0, COLUMNS), tl.arange(0, GROUPS), channels // groups
    c, g = tl.program_id(1) * BLOCK + own_c, tl.program_id(1) * (BLOCK // group_channels) + own_g
    has_c = (own_c < BLOCK) & (c < channels)
    has_g = (own_g < BLOCK // group_channels) & (g < groups)
    return c, has_c, g, has_g, (own_c // group_channels)[:, None] == own_g[None, :]


@triton.jit
def _group_sums(values, member):
    """Values of channels, zero for channels that do not exist, summed over each group."""
    return tl.sum(tl.where(member, values[:, None], 0.0), 0)


@triton.jit
def _per_channel(values, member):
    """Values of groups, repeated for their channels."""
    return tl.sum(tl.where(member, values[None, :], 0.0), 1)


@triton.jit
def _centers(group_mean, h_bias, c, has_c, member):
    """The value subtracted from h: the mean of each channel's group, less h_bias."""
    centers = _per_channel(group_mean, member)
    if h_bias is not None:
        centers -= tl.load(h_bias + c, mask=has_c, other=0.0).to(tl.float32)
    return centers


@triton.jit
def _tile(tile, pixels, channels, c, has_c, image, ROWS: tl.constexpr):
    """Offsets of a tile, and which elements exist."""
    p = tile * ROWS + tl.arange(0, ROWS)
    offsets = p.to(tl.int64)[:, None] * channels + c[None, :]
    return image * channels * pixels + offsets, (p < pixels)[:, None] & has_c[None, :]


@triton.jit
def _load_statistics(statistics, image, groups, g, has_g):
    """Mean and rstd of groups of an image."""
    mean, rstd = statistics + image * groups + g, statistics + (tl.num_programs(2) + image) * groups + g
    return tl.load(mean, mask=has_g, other=0.0), tl.load(rstd, mask=has_g, other=0.0)


@triton.jit
def _load_weight_and_bias(weight, bias, c, has_c):
    """Weight and bias of channels, fp32."""
    w = tl.load(weight + c, mask=has_c, other=0.0).to(tl.float32)
    return w, tl.load(bias + c, mask=has_c, other=0.0).to(tl.float32)


@triton.jit
def _load_unit_and_gradient(h, grad_out, offsets, inside, center, rstd, w, b, SILU: tl.constexpr):
    """The unit of a tile, and the gradient with respect to unit * weight + bias."""
    x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
    unit = (x - center[None, :]) * rstd[None, :]
    if SILU:
        affine = unit * w[None, :] + b[None, :]
        gate = tl.sigmoid(affine)
        grad = grad * gate * (1 + affine * (1 - gate))
    return unit, grad


@triton.jit
def _width(channels, groups):
    """Columns of the matrix of sums: sums_kernel and input_gradient_kernel."""
    return 3 * channels + 2 * groups


@triton.jit
def _column_sums(matrix, rows, width, column, has, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of columns over the first rows of a matrix of this width."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, rows, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & has[None, :]
        total += tl.load(matrix + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def moments_kernel(
    h,
    h_bias,
    moments,
    pixels,
    channels,
    groups,
    tiles_per_program,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Per group: mean of this program's pixels, and sum of their squared deviations from it.

    First per element of a tile (Welford, 1962), then merged (Chan, Golub and LeVeque, 1983).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    image, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    c, has_c, g, has_g, member = _block(channels, groups, BLOCK, COLUMNS, GROUPS)
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        tile = program * tiles_per_program + index
        offsets, inside = _tile(tile, pixels, channels, c, has_c, image, ROWS)
        x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
        delta = tl.where(inside, x - mean, 0.0)  # only after the last pixel of an image is an element missing
        mean += delta * (1.0 / (index + 1))
        square += delta * (x - mean)
    missing = program * tiles_per_program * ROWS + tl.arange(0, ROWS) - pixels
    count = tl.minimum(tl.maximum(ROWS - 1 - missing, 0) // ROWS, tiles_per_program).to(tl.float32)
    total = tl.sum(count, 0)
    channel_mean = tl.sum(mean * count[:, None], 0) / total
    deviation = mean - channel_mean[None, :]
    channel_square = tl.sum(square + deviation * deviation * count[:, None], 0)
    if h_bias is not None:
        channel_mean += tl.load(h_bias + c, mask=has_c, other=0.0).to(tl.float32)
    group_mean = _group_sums(channel_mean, member) / (channels // groups)
    deviation = tl.where(has_c, channel_mean - _per_channel(group_mean, member), 0.0)
    group_square = _group_sums(channel_square + deviation * deviation * total, member)
    row = image * programs + program
    tl.store(moments + row * groups + g, group_mean, mask=has_g)
    tl.store(moments + (batch * programs + row) * groups + g, group_square, mask=has_g)


@triton.jit
def _merged_moments(
    moments, image, pixels, channels, groups, rows, g, has_g, PARTS: tl.constexpr, GROUPS: tl.constexpr
):
    """Mean and variance of groups, from the moments of parts of `rows` pixels (Chan et al.)."""
    programs = tl.num_programs(0)
    squares = moments + tl.num_programs(2).to(tl.int64) * programs * groups
    count = tl.zeros([PARTS], tl.float32)
    mean, square = tl.zeros([PARTS, GROUPS], tl.float32), tl.zeros([PARTS, GROUPS], tl.float32)
    for first in tl.range(0, programs, PARTS, num_stages=STAGES):
        part = first + tl.arange(0, PARTS)
        own = tl.maximum(tl.minimum(pixels - part * rows, rows), 0).to(tl.float32) * (channels // groups)
        share = own / tl.maximum(count + own, 1.0)
        inside = (part < programs)[:, None] & has_g[None, :]
        offsets = (image * programs + part)[:, None] * groups + g[None, :]
        delta = tl.load(moments + offsets, mask=inside, other=0.0) - mean
        mean += delta * share[:, None]
        square += delta * delta * (count * share)[:, None]
        square += tl.load(squares + offsets, mask=inside, other=0.0)
        count += own
    total = tl.sum(count, 0)
    group_mean = tl.sum(mean * count[:, None], 0) / total
    deviation = mean - group_mean[None, :]
    return group_mean, tl.sum(square + deviation * deviation * count[:, None], 0) / total


@triton.jit
def normalize_kernel(
    h,
    h_bias,
    out,
    moments,
    statistics,
    weight,
    bias,
    eps,
    pixels,
    channels,
    groups,
    tiles_per_program,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
):
    """out = unit * weight + bias, then SiLU.

    With `moments`, of all programs of moments_kernel, mean and rstd are results: their merged values.
    """
    program, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c, has_c, g, has_g, member = _block(channels, groups, BLOCK, COLUMNS, GROUPS)
    if moments is not None:
        PARTS: tl.constexpr = ROWS * COLUMNS // GROUPS // 4
        rows = tiles_per_program * ROWS
        group_mean, variance = _merged_moments(
            moments, image, pixels, channels, groups, rows, g, has_g, PARTS, GROUPS
        )
        group_rstd = 1.0 / tl.sqrt(variance + eps)
        if program == 0:
            tl.store(statistics + image * groups + g, group_mean, mask=has_g)
            tl.store(statistics + (tl.num_programs(2) + image) * groups + g, group_rstd, mask=has_g)
    else:
        group_mean, group_rstd = _load_statistics(statistics, image, groups, g, has_g)
    center, channel_rstd = _centers(group_mean, h_bias, c, has_c, member), _per_channel(group_rstd, member)
    w, b = _load_weight_and_bias(weight, bias, c, has_c)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        tile = program * tiles_per_program + index
        offsets, inside = _tile(tile, pixels, channels, c, has_c, image, ROWS)
        x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
        unit = (x - center[None, :]) * channel_rstd[None, :]
        affine = unit * w[None, :] + b[None, :]
        if SILU:
            affine = affine * tl.sigmoid(affine)
        tl.store(out + offsets, affine.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sums_kernel(
    grad_out,
    h,
    h_bias,
    statistics,
    weight,
    bias,
    sums,
    pixels,
    channels,
    groups,
    tiles_per_program,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Sums of grad * unit and of grad over this program's pixels: per channel, and times weight per group.

    They are columns of this program's row of `sums`, which also has columns for input_gradient_kernel.
    """
    program, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c, has_c, g, has_g, member = _block(channels, groups, BLOCK, COLUMNS, GROUPS)
    group_mean, group_rstd = _load_statistics(statistics, image, groups, g, has_g)
    center, channel_rstd = _centers(group_mean, h_bias, c, has_c, member), _per_channel(group_rstd, member)
    w, b = _load_weight_and_bias(weight, bias, c, has_c)
    unit_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    grad_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        tile = program * tiles_per_program + index
        offsets, inside = _tile(tile, pixels, channels, c, has_c, image, ROWS)
        unit, grad = _load_unit_and_gradient(h, grad_out, offsets, inside, center, channel_rstd, w, b, SILU)
        unit_sum += grad * unit
        grad_sum += grad
    channel_unit, channel_grad = tl.sum(unit_sum, 0), tl.sum(grad_sum, 0)
    own = sums + (image * tl.num_programs(0) + program) * _width(channels, groups)
    tl.store(own + c, channel_unit, mask=has_c)
    tl.store(own + channels + c, channel_grad, mask=has_c)
    tl.store(own + 2 * channels + g, _group_sums(channel_unit * w, member), mask=has_g)
    tl.store(own + 2 * channels + groups + g, _group_sums(channel_grad * w, member), mask=has_g)


@triton.jit
def input_gradient_kernel(
    grad_out,
    h,
    h_bias,
    skip,
    grad_h,
    statistics,
    weight,
    bias,
    sums,
    grad_weight,
    grad_bias,
    pixels,
    channels,
    groups,
    tiles_per_program,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SILU: tl.constexpr,
):
    """grad_h = (grad * weight - mean(grad * weight) - unit * mean(grad * weight * unit)) * rstd + skip.

    The gradients of weight and bias are sums over all programs: each program sums a few of its channels, as
    far as any are left. Each program writes its sums of `skip`, or without `skip` those of grad_h.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    image, width = tl.program_id(2).to(tl.int64), _width(channels, groups)
    FEW: tl.constexpr = min(COLUMNS, 16)  # fp32: 64 bytes
    SOME: tl.constexpr = ROWS * COLUMNS // FEW // 4
    rows = tl.num_programs(2) * programs
    for start in tl.range((image * programs + program).to(tl.int32) * FEW, BLOCK, rows * FEW, num_stages=1):
        own_c = start + tl.arange(0, FEW)
        few = tl.program_id(1) * BLOCK + own_c
        has_few = (own_c < BLOCK) & (few < channels)
        of_weight = _column_sums(sums, rows, width, few, has_few, SOME, FEW)
        of_bias = _column_sums(sums + channels, rows, width, few, has_few, SOME, FEW)
        tl.store(grad_weight + few, of_weight, mask=has_few)
        tl.store(grad_bias + few, of_bias, mask=has_few)
    c, has_c, g, has_g, member = _block(channels, groups, BLOCK, COLUMNS, GROUPS)
    PARTS: tl.constexpr = ROWS * COLUMNS // GROUPS // 2
    own, count = sums + image * programs * width, 1.0 * pixels * (channels // groups)
    unit_sum = _column_sums(own + 2 * channels, programs, width, g, has_g, PARTS, GROUPS)
    grad_sum = _column_sums(own + 2 * channels + groups, programs, width, g, has_g, PARTS, GROUPS)
    unit_mean, grad_mean = _per_channel(unit_sum / count, member), _per_channel(grad_sum / count, member)
    group_mean, group_rstd = _load_statistics(statistics, image, groups, g, has_g)
    center, channel_rstd = _centers(group_mean, h_bias, c, has_c, member), _per_channel(group_rstd, member)
    w, b = _load_weight_and_bias(weight, bias, c, has_c)
    last_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        tile = program * tiles_per_program + index
        offsets, inside = _tile(tile, pixels, channels, c, has_c, image, ROWS)
        unit, grad = _load_unit_and_gradient(h, grad_out, offsets, inside, center, channel_rstd, w, b, SILU)
        result = (grad * w[None, :] - grad_mean[None, :] - unit * unit_mean[None, :]) * channel_rstd[None, :]
        if skip is not None:
            addend = tl.load(skip + offsets, mask=inside, other=0.0).to(tl.float32)
            last_sum += addend
            result += addend
        tl.store(grad_h + offsets, result.to(grad_h.dtype.element_ty), mask=inside)
        if skip is None:
            last_sum += tl.where(inside, result, 0.0)
    tl.store(own + program * width + 2 * (channels + groups) + c, tl.sum(last_sum, 0), mask=has_c)


@triton.jit
def add_kernel(
    h,
    x,
    bias,
    pixels,
    channels,
    groups,
    tiles_per_program,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """h += x + bias."""
    image = tl.program_id(2).to(tl.int64)
    c, has_c, _, _, _ = _block(channels, groups, BLOCK, COLUMNS, GROUPS)
    b = tl.load(bias + c, mask=has_c, other=0.0).to(tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        tile = tl.program_id(0) * tiles_per_program + index
        offsets, inside = _tile(tile, pixels, channels, c, has_c, image, ROWS)
        total = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32) + b[None, :]
        total += tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + offsets, total.to(h.dtype.element_ty), mask=inside)


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics; h is dense in NHWC."""
    cut, batch = _cut(h, norm.groups), h.shape[0]
    moments = h.new_empty(2, batch, cut.grid[0], norm.groups, dtype=torch.float32)
    statistics = h.new_empty(2, batch, norm.groups, dtype=torch.float32)
    _run(moments_kernel, cut, (h, norm.h_bias, moments), cut.numbers)
    return normalize(h, statistics, norm, moments), statistics


def normalize(h: Tensor, statistics: Tensor, norm: Norm, moments: Tensor | None = None) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC. `moments`: see normalize_kernel."""
    cut, out = _cut(h, norm.groups), torch.empty_like(h, dtype=norm.out_dtype)
    tensors = (h, norm.h_bias, out, moments, statistics, norm.weight, norm.bias)
    numbers = (norm.eps, *cut.numbers, norm.silu)
    _run(normalize_kernel, cut, tensors, numbers)
    return out


def normalize_backward(
    grad_out: Tensor,
    h: Tensor,
    statistics: Tensor,
    norm: Norm,
    in_place: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_backward; grad_out and skip have h's strides."""
    cut, h_bias, parameters = _cut(h, norm.groups), norm.h_bias, (statistics, norm.weight, norm.bias)
    sums = h.new_empty(h.shape[0] * cut.grid[0], sums_width(h, norm), dtype=torch.float32)
    grad_weight = torch.empty_like(norm.weight, dtype=torch.float32)
    grad_bias = torch.empty_like(grad_weight)
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    numbers = (*cut.numbers, norm.silu)
    inputs = (grad_out, h, h_bias, *parameters, sums)
    _run(sums_kernel, cut, inputs, numbers)
    tensors = (grad_out, h, h_bias, skip, grad_h, *parameters, sums, grad_weight, grad_bias)
    _run(input_gradient_kernel, cut, tensors, numbers)
    return grad_h, grad_weight, grad_bias, sums[:, -h.shape[1] :].sum(0)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Implements vae.ops.norm.add_with_bias; h is dense in NHWC."""
    cut = _cut(h, groups=h.shape[1])  # tiles of any channels
    tensors = (h, x.contiguous(memory_format=torch.channels_last), bias)
    _run(add_kernel, cut, tensors, cut.numbers)
    return h


class Cut(NamedTuple):
    """The tiling of a tensor, and the numbers that all kernels get."""

    grid: tuple[int, int, int]  # programs along the pixels, blocks of channels, images
    numbers: tuple[int, ...]


def _cut(h: Tensor, groups: int) -> Cut:
    """The cut of h (B, C, H, W)."""
    assert h.is_contiguous(memory_format=torch.channels_last)
    return _cut_of(h.shape, groups, reduction_programs(processors(h.get_device())))


@lru_cache(MAX_COMPILED_KERNELS)
def _cut_of(shape: torch.Size, groups: int, programs: int) -> Cut:
    batch, channels, height, width = shape
    blocks = norm_blocks(batch, channels, height * width, groups, programs)
    sizes = (blocks.channels, blocks.rows, blocks.columns, blocks.groups)
    numbers = (height * width, channels, groups, blocks.tiles_per_program, *sizes)
    return Cut((blocks.programs, blocks.column_blocks, batch), numbers)


def _run(
    kernel: triton.JITFunction, cut: Cut, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
) -> None:
    launch(kernel, cut.grid, NUM_WARPS, tensors, numbers, MAX_REGISTERS)
