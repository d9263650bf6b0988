"""RMS norm(+SiLU) on a GPU, in channels_last layout: one Triton kernel in each direction.

A tile is some pixels (rows) with all of their channels (columns). Forward reads h once and writes once;
backward reads h and grad_out once and writes once, and each program also writes its sums over pixels. All
arithmetic is fp32, all offsets are 64 bits. The speed is not measured yet.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

# Triton reads the annotations of kernels: only `constexpr` parameters have one.
# mypy: disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are uppercase, as in Triton's own kernels

import torch
import triton
import triton.language as tl
from torch import Tensor

from vae.ops.library import MAX_REGISTERS, NUM_WARPS, launch, processors, reduction_programs, rms_blocks
from vae.ops.norm import MIN_LENGTH, Norm

STAGES = tl.constexpr(3)  # two tiles of each tensor in flight: 64 KiB for two tensors in fp32


@triton.jit
def _tile(tile, pixels, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a tile, and which elements exist."""
    pixel, channel = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    return pixel[:, None] * channels + channel[None, :], inside


@triton.jit
def _load_unit(h, h_bias, offsets, inside, channels, root, least, COLUMNS: tl.constexpr):
    """(h + h_bias) of a tile, scaled to mean square 1 over the channels, and the scale of each row."""
    x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
    if h_bias is not None:
        channel = tl.arange(0, COLUMNS)
        bias = tl.load(h_bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        x += tl.where(inside, bias[None, :], 0.0)
    scale = root / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), least)
    return x * scale[:, None], scale


@triton.jit
def forward_kernel(
    h,
    h_bias,
    out,
    weight,
    root,
    least,
    pixels,
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
):
    """out = unit * weight, then SiLU: one tile of each program."""
    channel = tl.arange(0, COLUMNS)
    w = tl.load(weight + channel, mask=channel < channels, other=0.0).to(tl.float32)
    offsets, inside = _tile(tl.program_id(0), pixels, channels, ROWS, COLUMNS)
    unit, _ = _load_unit(h, h_bias, offsets, inside, channels, root, least, COLUMNS)
    values = unit * w[None, :]
    if SILU:
        values = values * tl.sigmoid(values)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_out,
    h,
    h_bias,
    skip,
    grad_h,
    weight,
    sums,
    root,
    least,
    pixels,
    channels,
    tiles_per_program,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
):
    """grad_h = (grad * weight - unit * mean of grad * weight * unit over the channels) * scale + skip.

    A row of `sums`: this program's sums over pixels of grad * unit, and of `skip` or, without it, of grad_h.
    """
    program, channel = tl.program_id(0), tl.arange(0, COLUMNS)
    has = channel < channels
    w = tl.load(weight + channel, mask=has, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    last_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        offsets, inside = _tile(program * tiles_per_program + index, pixels, channels, ROWS, COLUMNS)
        unit, scale = _load_unit(h, h_bias, offsets, inside, channels, root, least, COLUMNS)
        grad = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            affine = unit * w[None, :]
            gate = tl.sigmoid(affine)
            grad = grad * gate * (1 + affine * (1 - gate))
        product = grad * unit
        weight_sum += product
        mean = tl.sum(product * w[None, :], 1) / channels
        result = (grad * w[None, :] - unit * mean[:, None]) * scale[:, None]
        if skip is not None:
            addend = tl.load(skip + offsets, mask=inside, other=0.0).to(tl.float32)
            last_sum += addend
            result += addend
        tl.store(grad_h + offsets, result.to(grad_h.dtype.element_ty), mask=inside)
        if skip is None:
            last_sum += tl.where(inside, result, 0.0)
    row = sums + program.to(tl.int64) * 2 * channels + channel
    tl.store(row, tl.sum(weight_sum, 0), mask=has)
    tl.store(row + channels, tl.sum(last_sum, 0), mask=has)


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics; there are no statistics."""
    statistics = h.new_empty(0)
    return normalize(h, statistics, norm), statistics


def normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC."""
    assert h.is_contiguous(memory_format=torch.channels_last)
    out, channels = torch.empty_like(h, dtype=norm.out_dtype), h.shape[1]
    pixels = h.numel() // channels
    blocks = rms_blocks(channels, pixels, reduction_programs())
    numbers = (channels**0.5, MIN_LENGTH, pixels, channels, blocks.rows, blocks.columns, norm.silu)
    launch(forward_kernel, (blocks.tiles, 1, 1), NUM_WARPS, (h, norm.h_bias, out, norm.weight), numbers)
    return out


def normalize_backward(
    grad_out: Tensor,
    h: Tensor,
    statistics: Tensor,
    norm: Norm,
    in_place: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Implements vae.ops.norm.normalize_backward; grad_out and skip have h's strides."""
    assert h.is_contiguous(memory_format=torch.channels_last)
    channels = h.shape[1]
    pixels = h.numel() // channels
    blocks = rms_blocks(channels, pixels, reduction_programs(processors(h.get_device())))
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    sums = h.new_empty(blocks.programs, 2, channels, dtype=torch.float32)
    numbers = (channels**0.5, MIN_LENGTH, pixels, channels, blocks.tiles_per_program)
    constants = (blocks.rows, blocks.columns, norm.silu)
    tensors = (grad_out, h, norm.h_bias, skip, grad_h, norm.weight, sums)
    grid = blocks.programs, 1, 1
    launch(backward_kernel, grid, NUM_WARPS, tensors, (*numbers, *constants), MAX_REGISTERS)
    weight, last = sums.sum(0)
    return grad_h, weight, None, last
