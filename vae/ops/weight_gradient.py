"""Gradients of a convolution's weight and bias; on the CPU in bands of rows that stay in a cache.

PyTorch's kernel for weights slows down on large maps. Measured on one core of an AMD EPYC with AVX-512,
channels last, GFLOP/s whole and in bands: 3x3 of 128 channels at 256 px, bf16, 146 and 184; 4x4 of
enlargement by two from 256 channels at 128 px 101 and 186, in fp32 44 and 81; 3x3 of stride 2 at 256 px 88
and 164. Smaller maps and 1x1 kernels are slower in bands (bf16 at 128 px 197 and 182).
"""

import torch
import torch.nn.functional as F

from vae.ops.conv_backward import conv_backward
from vae.ops.layout import wide_dtype
from vae.ops.library import has_no_data

WHOLE_PLANE_BYTES = 2**15  # up to here, for one channel of the larger map, bands are no use; half for 4x4
BAND_BYTES = 2**22  # of both maps together: 2**21 to 2**23 are alike within 10 % on that core (L2: 1 MiB)


def conv_weight_gradient(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight (C', C, k, k) and bias (C') of a convolution of h; bands are summed in fp32.

    `padding`: of rows and columns. `weight` gives shape and layout: its values are not read.
    """
    if not _in_bands(grad_out, h, weight.shape[2]):
        _, *grads = _backward(grad_out, h, weight, stride, padding, (False, True, True))
        return tuple(grads)
    return _banded(grad_out, h, weight, stride, padding), grad_out.sum((0, 2, 3))


def transposed_conv_weight_gradient(
    grad_out: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, stride: int, padding: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same of a transposed convolution of h by weight (C, C', k, k); None where bands are no use.

    Its weight's gradient is that of the convolution whose input is grad_out and whose output gradient is h.
    """
    if not _in_bands(h, grad_out, weight.shape[2]):
        return None
    return _banded(h, grad_out, weight, stride, padding), grad_out.sum((0, 2, 3))


def _in_bands(grad_out: torch.Tensor, h: torch.Tensor, size: int) -> bool:
    """Whether bands help: large maps on the CPU in which rows lie together."""
    if grad_out.device.type != "cpu" or has_no_data(grad_out) or size == 1:
        return False
    if h.is_contiguous() or grad_out.is_contiguous():
        return False
    plane = max(grad_out[0, 0].numel(), h[0, 0].numel()) * h.element_size()
    return plane > WHOLE_PLANE_BYTES // (1 if size < 4 else 2)


def _banded(
    grad_out: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, stride: int, padding: tuple[int, int]
) -> torch.Tensor:
    """The weight's gradient, the sum over bands of rows of each image."""
    rows, size = grad_out.shape[2], weight.shape[2]
    step = max(1, rows * BAND_BYTES // (grad_out[0].nbytes + h[0].nbytes))
    total = torch.zeros_like(weight, dtype=wide_dtype(h))
    for image in range(len(h)):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            top, bottom = first * stride - padding[0], (last - 1) * stride - padding[0] + size
            part = h[image : image + 1, :, max(top, 0) : bottom]
            missing = (max(-top, 0), max(bottom - h.shape[2], 0))
            part = F.pad(part, (0, 0, *missing)) if any(missing) else part
            grad = grad_out[image : image + 1, :, first:last]
            total += _backward(grad, part, weight, stride, (0, padding[1]), (False, True, False))[1]
    return total


def _backward(grad_out, h, weight, stride, padding, wanted):
    weight = torch.empty_like(weight, dtype=h.dtype)
    return conv_backward(grad_out, h, weight, stride, padding, wanted)
