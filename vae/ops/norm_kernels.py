"""Triton kernels of GroupNorm(+SiLU); vae.ops.norm_triton launches them.

A tile is some pixels (rows) of some channels (columns) of one image. `unit` is (h - mean) * rstd.
"""

# Triton reads the annotations of kernels: only `constexpr` parameters have one.
# mypy: disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are uppercase, as in Triton's own kernels

import triton
import triton.language as tl


@triton.jit
def _tile(tile, pixels, channels, stride_p, stride_c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Channels of this program, offsets of one tile within its image, and which elements exist."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    p = tile * ROWS + tl.arange(0, ROWS)
    offsets = p.to(tl.int64)[:, None] * stride_p + c.to(tl.int64)[None, :] * stride_c
    return c, offsets, (p < pixels)[:, None] & (c < channels)[None, :]


@triton.jit
def _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups):
    """unit of a tile, and rstd of its channels."""
    group = image * groups + c // (channels // groups)
    group_mean = tl.load(mean + group, mask=c < channels, other=0.0)
    group_rstd = tl.load(rstd + group, mask=c < channels, other=0.0)
    x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
    return (x - group_mean[None, :]) * group_rstd[None, :], group_rstd


@triton.jit
def _gradient_tile(grad_out, unit, w, bias, c, offsets, inside, channels, SILU: tl.constexpr):
    """Gradient with respect to unit * weight + bias; zero for elements that do not exist."""
    grad = tl.load(grad_out + offsets, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
        affine = unit * w[None, :] + b[None, :]
        gate = tl.sigmoid(affine)
        grad = grad * gate * (1 + affine * (1 - gate))
    return grad


@triton.jit
def _moments_tile(
    first,
    group,
    image,
    pixels,
    channels,
    programs,
    rows_per_program,
    group_channels: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Offsets of partial moments of a group, which of them exist, and the number of pixels of each part."""
    c = tl.arange(0, COLUMNS)
    part = first + tl.arange(0, PARTS)
    inside = (part < programs)[:, None] & (c < group_channels)[None, :]
    offsets = (image * programs + part)[:, None] * channels + (group * group_channels + c)[None, :]
    count = tl.minimum(pixels - part * rows_per_program, rows_per_program).to(tl.float32)
    return offsets, inside, count


@triton.jit
def partial_moments_kernel(
    h,
    means,
    squares,
    pixels,
    channels,
    stride_b,
    stride_p,
    stride_c,
    tiles_per_program,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
        _, offsets, inside = _tile(tile, pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
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
def merge_moments_kernel(
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
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean and rstd of one group of one image from the moments of its channels and blocks of pixels."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = 1.0 * group_channels * pixels
    mean = 0.0
    for first in range(0, programs, PARTS):
        offsets, inside, count = _moments_tile(
            first, group, image, pixels, channels, programs, rows_per_program, group_channels, PARTS, COLUMNS
        )
        share = count / total
        mean += tl.sum(tl.load(means + offsets, mask=inside, other=0.0) * share[:, None])
    variance = 0.0
    for first in range(0, programs, PARTS):
        offsets, inside, count = _moments_tile(
            first, group, image, pixels, channels, programs, rows_per_program, group_channels, PARTS, COLUMNS
        )
        share = count / total
        deviation = tl.load(means + offsets, mask=inside, other=0.0) - mean
        own = tl.load(squares + offsets, mask=inside, other=0.0) / total
        variance += tl.sum(own + tl.where(inside, deviation * deviation * share[:, None], 0.0))
    target = image * tl.num_programs(0) + group
    tl.store(mean_out + target, mean)
    tl.store(rstd_out + target, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def normalize_kernel(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
):
    """out = unit * weight + bias, then SiLU."""
    image = tl.program_id(2).to(tl.int64)
    c, offsets, inside = _tile(tl.program_id(0), pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
    offsets += image * stride_b
    unit, _ = _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups)
    w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
    affine = unit * w[None, :] + b[None, :]
    if SILU:
        affine = affine * tl.sigmoid(affine)
    tl.store(out + offsets, affine.to(out.dtype.element_ty), mask=inside)


@triton.jit
def partial_sums_kernel(
    grad_out,
    h,
    mean,
    rstd,
    weight,
    bias,
    grad_unit_sums,
    grad_sums,
    pixels,
    channels,
    groups,
    stride_b,
    stride_p,
    stride_c,
    tiles_per_program,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Per channel: sums of grad * unit and of grad over this program's pixels."""
    program = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
    grad_unit_sum = tl.zeros([COLUMNS], tl.float32)
    grad_sum = tl.zeros([COLUMNS], tl.float32)
    for index in range(tiles_per_program):
        tile = program * tiles_per_program + index
        _, offsets, inside = _tile(tile, pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
        offsets += image * stride_b
        unit, _ = _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups)
        grad = _gradient_tile(grad_out, unit, w, bias, c, offsets, inside, channels, SILU)
        grad_unit_sum += tl.sum(grad * unit, 0)
        grad_sum += tl.sum(grad, 0)
    target = (image * tl.num_programs(0) + program) * channels + c
    tl.store(grad_unit_sums + target, grad_unit_sum, mask=c < channels)
    tl.store(grad_sums + target, grad_sum, mask=c < channels)


@triton.jit
def merge_sums_kernel(
    grad_unit_sums,
    grad_sums,
    weight,
    channel_sums,
    group_means,
    pixels,
    channels,
    programs,
    group_channels: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of each channel of one group, and the group's means of grad * weight * unit and grad * weight."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups, batch = tl.num_programs(0), tl.num_programs(1)
    c = tl.arange(0, COLUMNS)
    own = group * group_channels + c
    grad_unit_sum = tl.zeros([COLUMNS], tl.float32)
    grad_sum = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < programs)[:, None] & (c < group_channels)[None, :]
        offsets = (image * programs + part)[:, None] * channels + own[None, :]
        grad_unit_sum += tl.sum(tl.load(grad_unit_sums + offsets, mask=inside, other=0.0), 0)
        grad_sum += tl.sum(tl.load(grad_sums + offsets, mask=inside, other=0.0), 0)
    exists = c < group_channels
    tl.store(channel_sums + image * channels + own, grad_unit_sum, mask=exists)
    tl.store(channel_sums + (batch + image) * channels + own, grad_sum, mask=exists)
    w = tl.load(weight + own, mask=exists, other=0.0).to(tl.float32)
    count = 1.0 * group_channels * pixels
    tl.store(group_means + image * groups + group, tl.sum(grad_unit_sum * w) / count)
    tl.store(group_means + (batch + image) * groups + group, tl.sum(grad_sum * w) / count)


@triton.jit
def input_gradient_kernel(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
):
    """grad_h = (grad * weight - mean(grad * weight) - unit * mean(grad * weight * unit)) * rstd."""
    image, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    c, offsets, inside = _tile(tl.program_id(0), pixels, channels, stride_p, stride_c, ROWS, COLUMNS)
    offsets += image * stride_b
    unit, group_rstd = _unit_tile(h, mean, rstd, c, offsets, inside, image, channels, groups)
    w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
    grad = _gradient_tile(grad_out, unit, w, bias, c, offsets, inside, channels, SILU)
    group = c // (channels // groups)
    grad_unit_mean = tl.load(group_means + image * groups + group, mask=c < channels, other=0.0)
    grad_mean = tl.load(group_means + (batch + image) * groups + group, mask=c < channels, other=0.0)
    result = (grad * w[None, :] - grad_mean[None, :] - unit * grad_unit_mean[None, :]) * group_rstd[None, :]
    tl.store(grad_h + offsets, result.to(grad_h.dtype.element_ty), mask=inside)
