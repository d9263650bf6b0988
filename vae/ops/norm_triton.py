"""GroupNorm(+SiLU) on a GPU, in NHWC or NCHW: launches the kernels of vae.ops.norm_kernels.

Memory bandwidth bounds these operations, so memory traffic decides their speed: forward reads h twice and
writes once, backward reads h and grad_out twice and writes once. The 32 groups of one image do not fill a
GPU. Each reduction is therefore split over many programs, per channel and block of pixels, and a small kernel
merges the partial results (deviations from the own mean: Chan, Golub and LeVeque 1983). All arithmetic is
fp32, all offsets are 64 bits. The speed is not measured yet.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vae.ops import gpu_blocks
from vae.ops import norm_kernels as kernels
from vae.ops.gpu_blocks import NormBlocks, merge_tile, norm_blocks
from vae.ops.library import on_input_device


@on_input_device
def norm_statistics(h: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.norm_statistics; h is dense in NHWC or NCHW."""
    cut = _cut(h)
    blocks, size = cut.blocks, (cut.pixels, cut.channels)
    means, squares = h.new_empty(2, cut.batch, blocks.programs, cut.channels, dtype=torch.float32)
    mean, rstd = (h.new_empty(cut.batch, groups, dtype=torch.float32) for _ in range(2))
    kernels.partial_moments_kernel[cut.reduction_grid](
        h, means, squares, *size, *cut.strides, blocks.tiles_per_program, **cut.tile, **_launch()
    )
    rows, group_channels = blocks.tiles_per_program * blocks.rows, cut.channels // groups
    merged = (means, squares, mean, rstd, *size, blocks.programs, rows, eps, group_channels)
    kernels.merge_moments_kernel[(groups, cut.batch)](*merged, **_merge(group_channels))
    return mean, rstd


@on_input_device
def normalize(h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """Implements vae.ops.norm.normalize; h is dense in NHWC or NCHW."""
    cut = _cut(h)
    size = (cut.pixels, cut.channels, mean.shape[1], *cut.strides)
    out = torch.empty_like(h)
    kernels.normalize_kernel[cut.grid](
        h, out, mean, rstd, weight, bias, *size, SILU=silu, **cut.tile, **_launch()
    )
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
    cut, groups, norm = _cut(h), mean.shape[1], (mean, rstd, weight, bias)
    size, programs = (cut.pixels, cut.channels, groups, *cut.strides), cut.blocks.programs
    partial = h.new_empty(2, cut.batch, programs, cut.channels, dtype=torch.float32)
    channel_sums = h.new_empty(2, cut.batch, cut.channels, dtype=torch.float32)
    group_means = h.new_empty(2, cut.batch, groups, dtype=torch.float32)
    kernels.partial_sums_kernel[cut.reduction_grid](
        grad_out, h, *norm, *partial, *size, cut.blocks.tiles_per_program, SILU=silu, **cut.tile, **_launch()
    )
    group_channels = cut.channels // groups
    merged = (*partial, weight, channel_sums, group_means, cut.pixels, cut.channels, programs, group_channels)
    kernels.merge_sums_kernel[(groups, cut.batch)](*merged, **_merge(group_channels))
    grad_h = grad_out if in_place else torch.empty_like(h)  # each program reads a tile before it writes it
    kernels.input_gradient_kernel[cut.grid](
        grad_out, h, grad_h, *norm, group_means, *size, SILU=silu, **cut.tile, **_launch()
    )
    # sums into two new tensors: an operation must not return two views of one storage
    grad_weight, grad_bias = (sums.sum(dim=0) for sums in channel_sums)
    return grad_h, grad_weight, grad_bias


class _Cut(NamedTuple):
    """The sizes of h (B, C, H, W) and how kernels divide it."""

    batch: int
    channels: int
    pixels: int
    strides: tuple[int, int, int]  # along images, pixels and channels
    blocks: NormBlocks

    @property
    def tile(self) -> dict[str, int]:
        """Tile sizes as compile-time constants of a kernel."""
        return {"ROWS": self.blocks.rows, "COLUMNS": self.blocks.columns}

    @property
    def grid(self) -> tuple[int, int, int]:
        """A program for each tile."""
        return self.blocks.tiles, self.blocks.column_blocks, self.batch

    @property
    def reduction_grid(self) -> tuple[int, int, int]:
        """A program for several tiles."""
        return self.blocks.programs, self.blocks.column_blocks, self.batch


def _cut(h: Tensor) -> _Cut:
    batch, channels, height, width = h.shape
    pixels = height * width
    channels_last = not h.is_contiguous()
    strides = (channels * pixels, channels, 1) if channels_last else (channels * pixels, 1, pixels)
    return _Cut(batch, channels, pixels, strides, norm_blocks(batch, channels, pixels, channels_last))


def _merge(group_channels: int) -> dict[str, int]:
    """Tile and launch settings of a merging kernel."""
    parts, columns = merge_tile(group_channels)
    return {"PARTS": parts, "COLUMNS": columns, **_launch()}


def _launch() -> dict[str, int]:
    """Launch settings of all kernels; without matrix products there are no loads to pipeline."""
    return {"num_warps": gpu_blocks.NUM_WARPS, "num_stages": 1}
