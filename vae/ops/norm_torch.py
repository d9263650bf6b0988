"""GroupNorm(+SiLU) from PyTorch operations, for CPUs, fp64, and GPUs without Triton.

It computes in the dtype of the statistics, one part of the tensor at a time. The parts limit the memory: only
the result has the full size. (1, C, 1, 1) coefficients of each image: out = h * scale + shift.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.library import accumulation_dtype

# Elements of a part. CPU, per thread: 512 KiB in fp32, so that temporaries stay in a cache and reuse the same
# pages (benchmarks/LOG.md). GPU: 64 MiB in fp32, so that each launch fills the card.
CPU_PART_ELEMENTS = 2**17
GPU_PART_ELEMENTS = 2**24

Part = tuple[slice, slice, slice]  # images, all channels, rows


class Norm(NamedTuple):
    """GroupNorm of h (B, C, H, W) over groups of channels, with or without SiLU.

    Without a bias, it is the RMS norm of vae.ops.rms_norm instead, which has no groups and no eps.
    """

    weight: Tensor  # (C,), like the biases
    bias: Any  # Tensor, or None
    groups: int
    eps: float
    silu: bool = True
    h_bias: Tensor | None = None  # added to h where h is read: the bias of the convolution before the norm
    out_dtype: torch.dtype | None = None  # of the result; None: h's


def sums_width(h: Tensor, norm: Norm) -> int:
    """Sums of each program in a kernel's backward: two per group, two or three per channel."""
    return 2 * norm.groups + (2 if norm.h_bias is None else 3) * h.shape[1]


def normalize_with_statistics(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Implements vae.ops.norm.normalize_with_statistics."""
    statistics = norm_statistics(h, norm)
    return normalize(h, statistics, norm), statistics


def norm_statistics(h: Tensor, norm: Norm) -> Tensor:
    """Mean and rstd of groups; the mean is subtracted before squares are summed."""
    dtype, groups, count = accumulation_dtype(h), norm.groups, h[0].numel() // norm.groups
    sums, squares = h.new_zeros(2, *h.shape[:2], dtype=torch.float64)  # (B, C)
    for part in parts_of(h):
        sums[part[0]] += h[part].sum((2, 3), dtype=dtype)
    if norm.h_bias is not None:
        sums += norm.h_bias.double() * h[0, 0].numel()
    mean = (sums.unflatten(1, (groups, -1)).sum(-1) / count).to(dtype)
    center = _centers(mean, h, norm)
    for part in parts_of(h):
        squares[part[0]] += (h[part] - center[part[0]]).square_().sum((2, 3))
    variance = squares.unflatten(1, (groups, -1)).sum(-1) / count
    return torch.stack((mean, (variance + norm.eps).rsqrt().to(dtype)))


def normalize(h: Tensor, statistics: Tensor, norm: Norm) -> Tensor:
    """Implements vae.ops.norm.normalize."""
    out, (mean, rstd) = torch.empty_like(h, dtype=norm.out_dtype), statistics
    scale = _per_channel(rstd, h) * norm.weight[:, None, None]
    shift = norm.bias[:, None, None] - _centers(mean, h, norm) * scale
    for part in parts_of(h):
        values = (h[part] * scale[part[0]]).add_(shift[part[0]])
        out[part] = F.silu(values, inplace=True) if norm.silu else values
    return out


def normalize_backward(
    grad_out: Tensor, h: Tensor, statistics: Tensor, norm: Norm, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Implements vae.ops.norm.normalize_backward; grad_out has h's layout."""
    grad_h = grad_out if in_place else torch.empty_like(h)  # each part is read before it is written
    mean, rstd = statistics
    weights, biases = (p.to(mean.dtype)[:, None, None] for p in (norm.weight, norm.bias))
    rstds, centers = _per_channel(rstd, h), _centers(mean, h, norm)
    unit_shift = -centers * rstds
    # of grad * unit, of grad, and of grad_h: (B, C)
    unit_sums, sums, h_sums = h.new_zeros(3, *h.shape[:2], dtype=torch.float64)
    for part in parts_of(h):
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
    for part in parts_of(h):
        values = (h[part] * slope[part[0]]).add_(offset[part[0]])
        grad_h[part] = values.addcmul_(grad_in[part], gain[part[0]])
        if norm.h_bias is not None:
            h_sums[part[0]] += values.sum((2, 3))
    return grad_h, unit_sums.sum(0), sums.sum(0), None if norm.h_bias is None else h_sums.sum(0)


def add_with_bias(h: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """Implements vae.ops.norm.add_with_bias."""
    return h.add_(x).add_(bias.to(h.dtype)[:, None, None])


def parts_of(h: Tensor) -> Iterator[Part]:
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
    """What is subtracted from h, (B, C, 1, 1): the mean (B, G) of h + h_bias, less h_bias."""
    centers = _per_channel(mean, h)
    return centers if norm.h_bias is None else centers - norm.h_bias.to(mean.dtype)[:, None, None]


def _per_channel(per_group: Tensor, h: Tensor) -> Tensor:
    """(B, G) repeated to (B, C, 1, 1)."""
    return per_group.repeat_interleave(h.shape[1] // per_group.shape[1], dim=1)[..., None, None]
