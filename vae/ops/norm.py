"""GroupNorm (Wu & He, 2018) and RMS norm (Zhang & Sennrich, 2019), alone and followed by SiLU.

They compute in the dtype of their input with fp32 statistics. Without a bias, all operations compute the RMS
norm over the channels of each pixel, whose statistics are empty.

Only the input and the statistics are saved: backward recomputes the normalized values. On a GPU, the
kernels of vae.ops.norm_triton and rms_norm_triton compute them. Else PyTorch does, one part of the tensor at
a time, so that only the result has the full size. Shapes as in vae.ops; G: groups of channels.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.library import (
    MAX_RMS_CHANNELS,
    accumulation_dtype,
    has_no_data,
    kernel_module,
    layout_of,
    norm_blocks,
    once_differentiable,
    reduction_programs,
    rms_blocks,
    uses_triton,
)

# Elements of a part. CPU, per thread: 512 KiB in fp32, so that temporaries stay in a cache and reuse the same
# pages (benchmarks/LOG.md). GPU: 64 MiB in fp32, so that each launch fills the card.
CPU_PART_ELEMENTS = 2**17
GPU_PART_ELEMENTS = 2**24
MIN_LENGTH = 1e-12  # of the channels of a pixel, as in torch.nn.functional.normalize

Part = tuple[slice, slice, slice]  # images, all channels, rows


class Norm(NamedTuple):
    """GroupNorm of h (B, C, H, W) over groups of channels, with or without SiLU.

    Without a bias, it is the RMS norm instead, which has no groups and no eps.
    """

    weight: Tensor  # (C,), like the biases
    bias: Any  # Tensor, or None
    groups: int
    eps: float
    silu: bool = True
    h_bias: Tensor | None = None  # added to h where h is read: the bias of the convolution before the norm
    out_dtype: torch.dtype | None = None  # of the result; None: h's


def group_norm(h: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """Normalize h (B, C, H, W) over each of `groups` channel groups of each image.

    Statistics are fp32 (fp64 if h is fp64) in every dtype of h. The result has h's dtype and layout.
    """
    return _GroupNorm.apply(h, weight, bias, groups, eps, False)


def group_norm_silu(h: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """SiLU of group_norm: the activation before most convolutions of the network."""
    return _GroupNorm.apply(h, weight, bias, groups, eps, True)


def group_norm_reference(
    h: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """The formula of the operations, computed in the dtype of h."""
    grouped = h.unflatten(1, (groups, -1))  # (B, G, C/G, H, W)
    variance, mean = torch.var_mean(grouped, dim=(2, 3, 4), correction=0, keepdim=True)
    unit = ((grouped - mean) / (variance + eps).sqrt()).flatten(1, 2)
    affine = unit * weight[:, None, None] + bias[:, None, None]
    return affine * affine.sigmoid() if silu else affine


def rms_norm_reference(h: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """h (B, C, H, W) / its length over C * sqrt(C) * weight (C,), then SiLU, in the dtype of h."""
    unit = F.normalize(h, dim=1) * h.shape[1] ** 0.5
    scaled = unit * weight.to(h.dtype)[:, None, None]
    return scaled * scaled.sigmoid() if silu else scaled


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The normalized h (see `normalize`), and mean and 1/sqrt(variance + eps) of each group of each image.

    The statistics are (2, B, G), fp32 (fp64 if h is fp64).
    """
    h = _dense(h)
    if has_no_data(h):
        partial = _partial_results(h, norm, 2 * norm.groups)  # noqa: F841 - counted until this function returns
        out = torch.empty_like(h, dtype=norm.out_dtype)
        return out, h.new_empty(2, len(h), norm.groups, dtype=accumulation_dtype(h))
    if kernels := backend(h, norm):
        return kernels.normalize_with_statistics(h, norm)
    return _normalize_with_statistics(h, norm)


def normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    """(h + h_bias - mean) * rstd * weight + bias, then SiLU if requested, in norm's dtype and h's layout.

    The RMS norm is rms_norm_reference of h + h_bias instead, computed in at least fp32.
    """
    h = _dense(h)
    if has_no_data(h):
        return torch.empty_like(h, dtype=norm.out_dtype)
    if kernels := backend(h, norm):
        return kernels.normalize(h, statistics, norm)
    return _normalize(h, statistics, norm)


def normalize_backward(
    grad_out: Tensor,
    h: Tensor,
    statistics: Tensor,
    norm: Norm,
    in_place: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of h (in its dtype and layout), weight, bias and h_bias (in their dtypes, from sums in fp32).

    The gradient of h includes the paths through the statistics. With `in_place` it overwrites grad_out, and
    the caller must not use grad_out again. `skip`, the gradient of h past the norm, is added to it. The last
    result is then the sum of `skip` instead: the gradient of the bias at the end of a residual block.
    """
    h = _dense(h)
    grad_out = grad_out.contiguous(memory_format=layout_of(h))
    skip = None if skip is None else skip.contiguous(memory_format=layout_of(h))
    if has_no_data(h):
        partial = _partial_results(h, norm, sums_width(h, norm))  # noqa: F841 - counted until this function returns
        grad_h = grad_out if in_place else torch.empty_like(h)
        bias = None if norm.bias is None else torch.empty_like(norm.bias)
        return grad_h, torch.empty_like(norm.weight), bias, torch.empty_like(norm.weight)
    kernels = backend(h, norm)
    backward = kernels.normalize_backward if kernels else _normalize_backward
    grad_h, weight, bias, sums = backward(grad_out, h, statistics, norm, in_place, skip)
    dtype = norm.weight.dtype
    return grad_h, weight.to(dtype), None if bias is None else bias.to(dtype), sums.to(dtype)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Add x, in h's shape, and the bias (C,) to h; return h."""
    if has_no_data(h):
        return h
    if kernels := backend(h):
        return kernels.add_with_bias(h, x, bias)
    return _add_with_bias(h, x, bias)


def backend(h: Tensor, norm: Norm | None = None) -> ModuleType | None:
    """The module with the Triton kernels of the norm, if they can run on h; else PyTorch computes it.

    Without a norm, that of add_with_bias.
    """
    is_rms = norm is not None and norm.bias is None
    operation = "rms_norm" if is_rms else "norm"
    if (is_rms and h.shape[1] > MAX_RMS_CHANNELS) or not uses_triton(operation, h):
        return None
    return kernel_module(f"vae.ops.{operation}_triton")


def sums_width(h: Tensor, norm: Norm) -> int:
    """Sums of each program in a kernel's backward: two per group and three per channel; RMS norm: two."""
    return 2 * norm.groups + (3 if norm.groups else 2) * h.shape[1]


def _dense(h: Tensor) -> Tensor:
    """h if it is contiguous, else h in channels_last layout; copied only if it has neither layout."""
    return h if h.is_contiguous() else h.contiguous(memory_format=torch.channels_last)


def _partial_results(h: Tensor, norm: Norm, columns: int) -> Tensor:
    """The kernels' partial sums, without data: `columns` of each program."""
    batch, channels, height, width = h.shape
    pixels, most = height * width, reduction_programs()
    if norm.groups:
        programs = batch * norm_blocks(batch, channels, pixels, norm.groups, most).programs
    else:
        programs = rms_blocks(channels, batch * pixels, most).programs
    return h.new_empty(programs, columns, dtype=accumulation_dtype(h))


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
    ) -> Tensor:
        out, statistics = normalize_with_statistics(h, Norm(weight, bias, groups, eps, silu))
        ctx.save_for_backward(h, statistics, weight, bias)
        ctx.numbers = groups, eps, silu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, statistics, weight, bias = ctx.saved_tensors
        norm = Norm(weight, bias, *ctx.numbers)
        return *normalize_backward(grad_out, h, statistics, norm)[:3], None, None, None


# ---- PyTorch operations, in the dtype of the statistics ------------------------------------------------
# (1, C, 1, 1) coefficients of each image: out = h * scale + shift


def _normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    statistics = _statistics(h, norm)
    return _normalize(h, statistics, norm), statistics


def _statistics(h: Tensor, norm: Norm) -> Tensor:
    """Mean and rstd of groups; the mean is subtracted before squares are summed."""
    dtype, groups = accumulation_dtype(h), norm.groups
    if not groups:
        return h.new_empty(0)
    count = h[0].numel() // groups
    sums, squares = h.new_zeros(2, *h.shape[:2], dtype=torch.float64)  # (B, C)
    for part in _parts_of(h):
        sums[part[0]] += h[part].sum((2, 3), dtype=dtype)
    if norm.h_bias is not None:
        sums += norm.h_bias.double() * h[0, 0].numel()
    mean = (sums.unflatten(1, (groups, -1)).sum(-1) / count).to(dtype)
    center = _centers(mean, h, norm)
    for part in _parts_of(h):
        squares[part[0]] += (h[part] - center[part[0]]).square_().sum((2, 3))
    variance = squares.unflatten(1, (groups, -1)).sum(-1) / count
    return torch.stack((mean, (variance + norm.eps).rsqrt().to(dtype)))


def _normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    if not norm.groups:
        return _rms_normalize(h, norm)
    out, (mean, rstd) = torch.empty_like(h, dtype=norm.out_dtype), statistics
    scale = _per_channel(rstd, h) * norm.weight[:, None, None]
    shift = norm.bias[:, None, None] - _centers(mean, h, norm) * scale
    for part in _parts_of(h):
        values = (h[part] * scale[part[0]]).add_(shift[part[0]])
        out[part] = F.silu(values, inplace=True) if norm.silu else values
    return out


def _normalize_backward(
    grad_out: Tensor,
    h: Tensor,
    statistics: Tensor,
    norm: Norm,
    in_place: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    if not norm.groups:
        return _rms_normalize_backward(grad_out, h, norm, in_place, skip)
    grad_h = grad_out if in_place else torch.empty_like(h)  # each part is read before it is written
    mean, rstd = statistics
    weights, biases = (p.to(mean.dtype)[:, None, None] for p in (norm.weight, norm.bias))
    rstds, centers = _per_channel(rstd, h), _centers(mean, h, norm)
    unit_shift = -centers * rstds
    # of grad * unit, of grad, and of grad_h or skip: (B, C)
    unit_sums, sums, last_sums = h.new_zeros(3, *h.shape[:2], dtype=torch.float64)
    for part in _parts_of(h):
        images, grad = part[0], grad_out[part].to(mean.dtype)
        unit = (h[part] * rstds[images]).add_(unit_shift[images])
        if norm.silu:
            grad = torch.ops.aten.silu_backward(grad, torch.addcmul(biases, unit, weights))
            grad_h[part] = grad  # in h's dtype, as autograd would pass it on
        sums[images] += grad.sum((2, 3))
        unit_sums[images] += unit.mul_(grad).sum((2, 3))
    # grad_h = (grad * weight - grad_mean - unit * grad_unit_mean) * rstd, with unit = (h - mean) * rstd
    grad_unit_mean, grad_mean = (_group_mean(total * norm.weight, mean, h) for total in (unit_sums, sums))
    gain, slope = rstds * weights, -grad_unit_mean * rstds.square()
    offset = (grad_unit_mean * centers * rstds - grad_mean) * rstds
    grad_in = grad_h if norm.silu else grad_out
    for part in _parts_of(h):
        values = (h[part] * slope[part[0]]).add_(offset[part[0]])
        values.addcmul_(grad_in[part], gain[part[0]])
        addend = values if skip is None else skip[part]
        last_sums[part[0]] += addend.sum((2, 3), dtype=mean.dtype)
        grad_h[part] = values if skip is None else values.add_(addend)
    return grad_h, unit_sums.sum(0), sums.sum(0), last_sums.sum(0)


def _add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return h.add_(x).add_(bias.to(h.dtype)[:, None, None])


def _parts_of(h: Tensor) -> Iterator[Part]:
    """Indices of parts of h (B, C, H, W): whole images if several fit in a part, else rows of one image."""
    on_cpu = h.device.type == "cpu"
    size = CPU_PART_ELEMENTS * torch.get_num_threads() if on_cpu else GPU_PART_ELEMENTS
    batch, channels, height, width = h.shape
    rows = max(1, size // (channels * width))
    images = max(1, size // h[0].numel())
    for image in range(0, batch, images):
        for row in range(0, height, rows):
            yield slice(image, image + images), slice(None), slice(row, row + rows)


def _group_mean(sums: Tensor, mean: Tensor, h: Tensor) -> Tensor:
    """Sums (B, C) as the mean over each group, (B, C, 1, 1) in the dtype of the statistics."""
    grouped = sums.view(*mean.shape, -1).sum(-1) / (h[0].numel() // mean.shape[1])
    return _per_channel(grouped.to(mean.dtype), h)


def _centers(mean: Tensor, h: Tensor, norm: Norm) -> Tensor:
    """The value subtracted from h, (B, C, 1, 1): the mean (B, G) of h + h_bias, less h_bias."""
    centers = _per_channel(mean, h)
    return centers if norm.h_bias is None else centers - norm.h_bias.to(mean.dtype)[:, None, None]


def _per_channel(per_group: Tensor, h: Tensor) -> Tensor:
    """(B, G) repeated to (B, C, 1, 1)."""
    return per_group.repeat_interleave(h.shape[1] // per_group.shape[1], dim=1)[..., None, None]


def _rms_normalize(h: Tensor, norm: Norm) -> Tensor:
    out = torch.empty_like(h, dtype=norm.out_dtype)
    weight = norm.weight.to(accumulation_dtype(h))[:, None, None]
    for part in _parts_of(h):
        unit, _ = _unit(h, norm, part)
        values = unit.mul_(weight)
        out[part] = F.silu(values, inplace=True) if norm.silu else values
    return out


def _rms_normalize_backward(
    grad_out: Tensor, h: Tensor, norm: Norm, in_place: bool, skip: Tensor | None
) -> tuple[Tensor, Tensor, None, Tensor]:
    grad_h = grad_out if in_place else torch.empty_like(h)  # each part is read before it is written
    weight = norm.weight.to(accumulation_dtype(h))[:, None, None]
    unit_sums, last_sums = h.new_zeros(2, h.shape[1], dtype=torch.float64)
    for part in _parts_of(h):
        unit, scale = _unit(h, norm, part)
        grad = grad_out[part].to(unit.dtype)
        if norm.silu:
            grad = torch.ops.aten.silu_backward(grad, unit * weight)
        products = unit * grad
        unit_sums += products.sum((0, 2, 3))
        means = products.mul_(weight).mean(1, keepdim=True)
        values = (grad * weight).sub_(unit.mul_(means)).mul_(scale)
        addend = values if skip is None else skip[part]
        last_sums += addend.sum((0, 2, 3), dtype=unit.dtype)
        grad_h[part] = values if skip is None else values.add_(addend)
    return grad_h, unit_sums, None, last_sums


def _unit(h: Tensor, norm: Norm, part: Part) -> tuple[Tensor, Tensor]:
    """A new tensor with mean square 1 over the channels, and the factor (b, 1, rows, W) that scaled it."""
    x = h[part].to(accumulation_dtype(h), copy=True)
    if norm.h_bias is not None:
        x += norm.h_bias.to(x.dtype)[:, None, None]
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(MIN_LENGTH)
    scale = length.reciprocal_().mul_(h.shape[1] ** 0.5)
    return x.mul_(scale), scale
