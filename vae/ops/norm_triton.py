"""GroupNorm(+SiLU) on a GPU, in NHWC or NCHW: Triton kernels, forward and backward.

Memory bounds these operations, so what counts is the traffic: forward reads h twice and writes once,
backward reads h and grad_out twice and writes once. 32 groups of one image fill no GPU; therefore each
reduction is split over many programs, per channel and block of pixels, and a small kernel merges the
partial results (deviations from the own mean: Chan, Golub and LeVeque 1983). All arithmetic is fp32, all
offsets are 64 bits. No speed was measured yet.

Import this only where Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

import torch
import triton
import triton.language as tl

from vae.ops.gpu_blocks import NUM_WARPS, NormBlocks, merge_tile, norm_blocks
from vae.ops.library import on_its_device

LAUNCH = {"num_warps": NUM_WARPS, "num_stages": 1}  # nothing to pipeline through shared memory: no products


@triton.jit
def _place(tile, pixels, channels, stride_p, stride_c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Channels of this program, offsets of one tile within its image, and which of them exist."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    p = tile * ROWS + tl.arange(0, ROWS)
    offsets = p.to(tl.int64)[:, None] * stride_p + c.to(tl.int64)[None, :] * stride_c
    return c, offsets, (p < pixels)[:, None] & (c < channels)[None, :]


@triton.jit
def _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups):
    """Normalised values of a tile, and 1/sigma of its channels."""
    group = image * groups + c // (channels // groups)
    level = tl.load(mean + group, mask=c < channels, other=0.0)
    scale = tl.load(rstd + group, mask=c < channels, other=0.0)
    x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
    return (x - level[None, :]) * scale[None, :], scale


@triton.jit
def _gradient_tile(grad_out, unit, w, bias, c, offsets, inside, channels, SILU: tl.constexpr):  # noqa: N803
    """Gradient with respect to unit * weight + bias, zero where nothing is."""
    grad = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
        affine = unit * w[None, :] + b[None, :]
        gate = tl.sigmoid(affine)
        grad = grad * gate * (1 + affine * (1 - gate))
    return grad


@triton.jit
def _partial_moments(
    h,
    means,
    squares,
    pixels,
    channels,
    stride_b,
    stride_p,
    stride_c,
    tiles_per_program,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Per channel: mean and sum of squared deviations over this program's pixels."""
    program = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = 0.0
    mean = tl.zeros([COLUMNS], tl.float32)
    square = tl.zeros([COLUMNS], tl.float32)
    for index in range(tiles_per_program):
        tile = program * tiles_per_program + index
        _, offsets, inside = _place(tile, pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
        x = tl.load(h + image * stride_b + offsets, mask=inside, other=0.0).to(tl.float32)
        own = tl.maximum(tl.minimum(pixels - tile * ROWS, ROWS), 0).to(tl.float32)
        own_mean = tl.sum(x, 0) / tl.maximum(own, 1.0)
        deviation = tl.where(inside, x - own_mean[None, :], 0.0)
        delta = own_mean - mean
        share = own / tl.maximum(count + own, 1.0)
        square += tl.sum(deviation * deviation, 0) + delta * delta * (count * share)
        mean += delta * share
        count += own
    target = (image * tl.num_programs(0) + program) * channels + c
    tl.store(means + target, mean, mask=c < channels)
    tl.store(squares + target, square, mask=c < channels)


@triton.jit
def _merge_moments(
    means,
    squares,
    mean_out,
    rstd_out,
    pixels,
    channels,
    programs,
    rows_per_program,
    eps,
    group_channels: tl.constexpr,
    PARTS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Mean and 1/sigma of one group of one image from the moments of its channels and blocks of pixels."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    total = 1.0 * group_channels * pixels
    mean = 0.0
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < programs)[:, None] & (c < group_channels)[None, :]
        offsets = (image * programs + part)[:, None] * channels + (group * group_channels + c)[None, :]
        share = tl.minimum(pixels - part * rows_per_program, rows_per_program).to(tl.float32) / total
        mean += tl.sum(tl.load(means + offsets, mask=inside, other=0.0) * share[:, None])
    variance = 0.0
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < programs)[:, None] & (c < group_channels)[None, :]
        offsets = (image * programs + part)[:, None] * channels + (group * group_channels + c)[None, :]
        share = tl.minimum(pixels - part * rows_per_program, rows_per_program).to(tl.float32) / total
        deviation = tl.load(means + offsets, mask=inside, other=0.0) - mean
        own = tl.load(squares + offsets, mask=inside, other=0.0) / total
        variance += tl.sum(own + tl.where(inside, deviation * deviation * share[:, None], 0.0))
    target = image * tl.num_programs(0) + group
    tl.store(mean_out + target, mean)
    tl.store(rstd_out + target, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _normalize(
    h,
    out,
    mean,
    rstd,
    weight,
    bias,
    pixels,
    channels,
    groups,
    stride_b,
    stride_p,
    stride_c,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
):
    image = tl.program_id(2).to(tl.int64)
    c, offsets, inside = _place(tl.program_id(0), pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
    offsets += image * stride_b
    unit, _ = _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups)
    w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
    affine = unit * w[None, :] + b[None, :]
    if SILU:
        affine = affine * tl.sigmoid(affine)
    tl.store(out + offsets, affine.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _partial_sums(
    grad_out,
    h,
    mean,
    rstd,
    weight,
    bias,
    unit_sums,
    level_sums,
    pixels,
    channels,
    groups,
    stride_b,
    stride_p,
    stride_c,
    tiles_per_program,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
):
    """Per channel: sums of grad * unit and of grad over this program's pixels."""
    program = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
    along = tl.zeros([COLUMNS], tl.float32)
    level = tl.zeros([COLUMNS], tl.float32)
    for index in range(tiles_per_program):
        tile = program * tiles_per_program + index
        _, offsets, inside = _place(tile, pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
        offsets += image * stride_b
        unit, _ = _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups)
        grad = _gradient_tile(grad_out, unit, w, bias, c, offsets, inside, channels, SILU)
        along += tl.sum(grad * unit, 0)
        level += tl.sum(grad, 0)
    target = (image * tl.num_programs(0) + program) * channels + c
    tl.store(unit_sums + target, along, mask=c < channels)
    tl.store(level_sums + target, level, mask=c < channels)


@triton.jit
def _merge_sums(
    unit_sums,
    level_sums,
    weight,
    channel_sums,
    group_means,
    pixels,
    channels,
    programs,
    group_channels: tl.constexpr,
    PARTS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Sums of each channel of one group, and the means over the group of grad * weight (* unit)."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups, batch = tl.num_programs(0), tl.num_programs(1)
    c = tl.arange(0, COLUMNS)
    own = group * group_channels + c
    along = tl.zeros([COLUMNS], tl.float32)
    level = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < programs)[:, None] & (c < group_channels)[None, :]
        offsets = (image * programs + part)[:, None] * channels + own[None, :]
        along += tl.sum(tl.load(unit_sums + offsets, mask=inside, other=0.0), 0)
        level += tl.sum(tl.load(level_sums + offsets, mask=inside, other=0.0), 0)
    exists = c < group_channels
    tl.store(channel_sums + image * channels + own, along, mask=exists)
    tl.store(channel_sums + (batch + image) * channels + own, level, mask=exists)
    w = tl.load(weight + own, mask=exists, other=0.0).to(tl.float32)
    count = 1.0 * group_channels * pixels
    tl.store(group_means + image * groups + group, tl.sum(along * w) / count)
    tl.store(group_means + (batch + image) * groups + group, tl.sum(level * w) / count)


@triton.jit
def _input_gradient(
    grad_out,
    h,
    grad_h,
    mean,
    rstd,
    weight,
    bias,
    group_means,
    pixels,
    channels,
    groups,
    stride_b,
    stride_p,
    stride_c,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
):
    """grad_h = (grad * weight - mean(grad * weight) - unit * mean(grad * weight * unit)) / sigma."""
    image, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    c, offsets, inside = _place(tl.program_id(0), pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
    offsets += image * stride_b
    unit, scale = _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups)
    w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
    grad = _gradient_tile(grad_out, unit, w, bias, c, offsets, inside, channels, SILU)
    group = c // (channels // groups)
    along = tl.load(group_means + image * groups + group, mask=c < channels, other=0.0)
    level = tl.load(group_means + (batch + image) * groups + group, mask=c < channels, other=0.0)
    found = (grad * w[None, :] - level[None, :] - unit * along[None, :]) * scale[None, :]
    tl.store(grad_h + offsets, found.to(grad_h.dtype.element_ty), mask=inside)


@on_its_device
def statistics(h: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What vae.ops.norm.norm_statistics computes; h is dense in NHWC or NCHW."""
    batch, channels, pixels, strides, blocks = _cut(h)
    means, squares = h.new_empty(2, batch, blocks.programs, channels, dtype=torch.float32)
    mean, rstd = (h.new_empty(batch, groups, dtype=torch.float32) for _ in range(2))
    shape = {"ROWS": blocks.rows, "COLUMNS": blocks.columns}
    _partial_moments[(blocks.programs, blocks.column_blocks, batch)](
        h, means, squares, pixels, channels, *strides, blocks.tiles_per_program, **shape, **LAUNCH
    )
    parts, columns = merge_tile(channels // groups)
    _merge_moments[(groups, batch)](
        means,
        squares,
        mean,
        rstd,
        pixels,
        channels,
        blocks.programs,
        blocks.tiles_per_program * blocks.rows,
        eps,
        channels // groups,
        PARTS=parts,
        COLUMNS=columns,
        **LAUNCH,
    )
    return mean, rstd


@on_its_device
def forward(
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """What vae.ops.norm.normalize computes; h is dense in NHWC or NCHW."""
    batch, channels, pixels, strides, blocks = _cut(h)
    out = torch.empty_like(h)
    shape = {"ROWS": blocks.rows, "COLUMNS": blocks.columns, "SILU": silu}
    _normalize[(blocks.tiles, blocks.column_blocks, batch)](
        h, out, mean, rstd, weight, bias, pixels, channels, mean.shape[1], *strides, **shape, **LAUNCH
    )
    return out


@on_its_device
def backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What vae.ops.norm.normalize_backward computes; grad_out has h's strides."""
    batch, channels, pixels, strides, blocks = _cut(h)
    groups = mean.shape[1]
    shape = {"ROWS": blocks.rows, "COLUMNS": blocks.columns, "SILU": silu}
    partial = h.new_empty(2, batch, blocks.programs, channels, dtype=torch.float32)
    channel_sums = h.new_empty(2, batch, channels, dtype=torch.float32)
    group_means = h.new_empty(2, batch, groups, dtype=torch.float32)
    _partial_sums[(blocks.programs, blocks.column_blocks, batch)](
        grad_out,
        h,
        mean,
        rstd,
        weight,
        bias,
        *partial,
        pixels,
        channels,
        groups,
        *strides,
        blocks.tiles_per_program,
        **shape,
        **LAUNCH,
    )
    parts, columns = merge_tile(channels // groups)
    _merge_sums[(groups, batch)](
        *partial,
        weight,
        channel_sums,
        group_means,
        pixels,
        channels,
        blocks.programs,
        channels // groups,
        PARTS=parts,
        COLUMNS=columns,
        **LAUNCH,
    )
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads what it writes, first
    _input_gradient[(blocks.tiles, blocks.column_blocks, batch)](
        grad_out,
        h,
        grad_h,
        mean,
        rstd,
        weight,
        bias,
        group_means,
        pixels,
        channels,
        groups,
        *strides,
        **shape,
        **LAUNCH,
    )
    # two tensors: views of one storage are no results that an operation may return
    grad_weight, grad_bias = (sums.sum(dim=0) for sums in channel_sums)
    return grad_h, grad_weight, grad_bias


def _cut(h: torch.Tensor) -> tuple[int, int, int, tuple[int, int, int], NormBlocks]:
    """Batch, channels and pixels of h, its strides along each of the three, and its blocks."""
    batch, channels, height, width = h.shape
    pixels = height * width
    channels_last = not h.is_contiguous()
    strides = (channels * pixels, channels, 1) if channels_last else (channels * pixels, 1, pixels)
    return batch, channels, pixels, strides, norm_blocks(batch, channels, pixels, channels_last)
