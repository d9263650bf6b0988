"""Distances of feature maps on a GPU, in channels_last layout: one Triton kernel in each direction.

A program processes the channels of a few positions at once. Each kernel reads both feature maps once, so
memory bandwidth decides its speed, which is not measured yet. Arithmetic is fp32, offsets are 64 bits.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

# Triton reads the annotations of kernels: only `constexpr` parameters have one.
# mypy: disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are uppercase, as in Triton's own kernels

import torch
import triton
import triton.language as tl
from torch import Tensor

from vae.losses.feature_distance import EPS
from vae.ops.library import launch, row_tile


@triton.jit
def _tile(positions, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of this program's positions and channels, and which of them exist."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, COLUMNS)
    image = tl.program_id(1).to(tl.int64)
    offsets = (image * positions + position[:, None]) * channels + channel[None, :]
    return offsets, (position < positions)[:, None] & (channel < channels)[None, :]


@triton.jit
def _unit_length(values, offsets, inside, eps):
    """The features divided by their length at each position, and 1 / length."""
    v = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32)
    inverse_norm = tl.rsqrt(tl.sum(v * v, 1) + eps)
    return v * inverse_norm[:, None], inverse_norm


@triton.jit
def distance_kernel(
    features, target, linear, sums, scale, eps, positions, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    offsets, inside = _tile(positions, channels, ROWS, COLUMNS)
    channel = tl.arange(0, COLUMNS)
    weight = tl.load(linear + channel, mask=channel < channels, other=0.0)
    unit, _ = _unit_length(features, offsets, inside, eps)
    target_unit, _ = _unit_length(target, offsets, inside, eps)
    difference = unit - target_unit
    total = tl.sum(tl.sum(difference * difference * weight[None, :], 1), 0) * scale
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def gradient_kernel(
    grad,
    features,
    target,
    linear,
    grad_features,
    scale,
    eps,
    positions,
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    offsets, inside = _tile(positions, channels, ROWS, COLUMNS)
    channel = tl.arange(0, COLUMNS)
    weight = tl.load(linear + channel, mask=channel < channels, other=0.0)
    unit, inverse_norm = _unit_length(features, offsets, inside, eps)
    target_unit, _ = _unit_length(target, offsets, inside, eps)
    slope = (unit - target_unit) * weight[None, :]
    slope -= unit * tl.sum(unit * slope, 1)[:, None]  # d(f/n)/df = (1 - u u^T)/n, with u = f/n
    slope *= (inverse_norm * tl.load(grad + tl.program_id(1)) * scale)[:, None]
    tl.store(grad_features + offsets, slope.to(grad_features.dtype.element_ty), mask=inside)


def distance(features: Tensor, target: Tensor, linear: Tensor) -> Tensor:
    """vae.losses.feature_distance.distance."""
    sums = linear.new_empty(features.shape[0], -(-features[0, 0].numel() // row_tile(features.shape[1]).rows))
    features, target = (t.contiguous(memory_format=torch.channels_last) for t in (features, target))
    _launch(distance_kernel, features, 1, features, target, linear, sums)
    return sums.sum(1)


def feature_gradient(grad: Tensor, features: Tensor, target: Tensor, linear: Tensor) -> Tensor:
    """vae.losses.feature_distance.feature_gradient."""
    features, target = (t.contiguous(memory_format=torch.channels_last) for t in (features, target))
    grad_features = torch.empty_like(features)
    _launch(gradient_kernel, features, 2, grad.contiguous(), features, target, linear, grad_features)
    return grad_features


def _launch(kernel: triton.JITFunction, features: Tensor, factor: int, *tensors: Tensor) -> None:
    """Run a kernel, whose results have the factor `factor / positions`."""
    batch, channels, height, width = features.shape
    positions = height * width
    tile = row_tile(channels)
    grid = (-(-positions // tile.rows), batch, 1)
    numbers = (factor / positions, EPS, positions, channels, tile.rows, tile.columns)
    launch(kernel, grid, tile.num_warps, tensors, numbers)
