"""Gradients of a convolution's weight and bias; on the CPU in bands of rows that stay in a cache.

PyTorch's kernel for weights slows down on large maps. Measured on one core of an AMD EPYC with AVX-512,
channels last, GFLOP/s whole and in bands: 3x3 of 128 channels at 256 px, bf16, 146 and 184; 3x3 of stride 2
at 256 px 88 and 164. Smaller maps and 1x1 kernels are slower in bands (bf16 at 128 px 197 and 182).
Behind an enlargement by two the 4x4 kernel of stride 2 gave 85 (512 channels at 64 px) and 101 (256 at 128
px), four 2x2 kernels give 198 and 195; the whole backward of 512 channels at 8, 16 and 32 px takes 51, 66
and 131 ms by the former, 50, 52 and 115 by the latter.
"""

import torch
import torch.nn.functional as F

from vae.ops.bands import Activation
from vae.ops.conv_backward import conv_backward
from vae.ops.layout import accumulation_dtype
from vae.ops.library import has_no_data

WHOLE_PLANE_BYTES = 2**15  # up to here, for one channel of the larger map, bands are no use
BAND_BYTES = 2**22  # of both maps together: 2**21 to 2**23 are alike within 10 % on that core (L2: 1 MiB)


def conv_weight_gradient(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight (C', C, k, k) and bias (C') of a convolution of activation(h), or h itself.

    `padding`: of rows and columns. `weight` gives shape and layout: its values are not read. Bands are
    summed in fp32, and each is activated while it lies in a cache.
    """
    if not _in_bands(grad_out, h, weight.shape[2]):
        part = h if activation is None else activation(h, slice(None))
        _, *grads = _backward(grad_out, part, weight, stride, padding, (False, True, True))
        return tuple(grads)
    return _banded(grad_out, h, weight, stride, padding, activation), grad_out.sum((0, 2, 3))


def upsampled_conv_weight_gradient(
    grad_out: torch.Tensor, h: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Gradients of weight (C', C, 3, 3) and bias (C') of a 3x3 convolution of h enlarged to twice its sides.

    None where this way was not found faster: off the CPU, and where rows do not lie together. The output
    rows of one parity meet two rows of h: the first tap the one and the other two the other, or two and one.
    So the outputs of one parity of rows and columns are a 2x2 convolution of h, whose four weights are sums
    of the nine; and those of all four parities hold four sums along each side.
    """
    if not _rows_lie_together_on_cpu(grad_out, h):
        return None
    (rows, columns), padded = h.shape[2:], F.pad(h, (1, 1, 1, 1))
    kernel = weight[:, :, :2, :2]  # its shape alone is read
    of_sums = torch.empty((*weight.shape[:2], 4, 4), dtype=weight.dtype, memory_format=torch.channels_last)
    for row in (0, 1):
        for column in (0, 1):
            grad = grad_out[:, :, row::2, column::2].contiguous(memory_format=torch.channels_last)
            part = padded[:, :, row : row + rows + 1, column : column + columns + 1]
            found = _backward(grad, part, kernel, 1, (0, 0), (False, True, False))[1]
            of_sums[:, :, row::2, column::2] = found
    of_rows = of_sums[:, :, :3] + of_sums[:, :, 1:]  # a tap's gradient: of both sums that it is part of
    return of_rows[..., :3] + of_rows[..., 1:], grad_out.sum((0, 2, 3))


def _in_bands(grad_out: torch.Tensor, h: torch.Tensor, size: int) -> bool:
    """Whether bands help: large maps on the CPU in which rows lie together."""
    if size == 1 or not _rows_lie_together_on_cpu(grad_out, h):
        return False
    plane = max(grad_out[0, 0].numel(), h[0, 0].numel()) * h.element_size()
    return plane > WHOLE_PLANE_BYTES


def _rows_lie_together_on_cpu(grad_out: torch.Tensor, h: torch.Tensor) -> bool:
    on_cpu = h.device.type == "cpu" and not has_no_data(h)
    return on_cpu and not (h.is_contiguous() or grad_out.is_contiguous())


def _banded(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    padding: tuple[int, int],
    activation: Activation | None,
) -> torch.Tensor:
    """The weight's gradient, the sum over bands of rows of each image."""
    rows, size = grad_out.shape[2], weight.shape[2]
    step = max(1, rows * BAND_BYTES // (grad_out[0].nbytes + h[0].nbytes))
    total = torch.zeros_like(weight, dtype=accumulation_dtype(h))
    for image in range(len(h)):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            top, bottom = first * stride - padding[0], (last - 1) * stride - padding[0] + size
            images = slice(image, image + 1)
            part = h[images, :, max(top, 0) : bottom]
            part = part if activation is None else activation(part, images)
            missing = (max(-top, 0), max(bottom - h.shape[2], 0))
            part = F.pad(part, (0, 0, *missing)) if any(missing) else part
            grad = grad_out[image : image + 1, :, first:last]
            total += _backward(grad, part, weight, stride, (0, padding[1]), (False, True, False))[1]
    return total


def _backward(grad_out, h, weight, stride, padding, wanted):
    weight = torch.empty_like(weight, dtype=h.dtype)
    return conv_backward(grad_out, h, weight, stride, padding, wanted)
