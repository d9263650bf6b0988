"""Downsampling and upsampling by two, each with its 3x3 convolution, as operations that store only the input.

Weights are cast to the input's dtype (and folded) within the operation, in both directions: no cast copy is
stored. Large images are processed in bands of rows (vae.ops.bands).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import add_to, bands, parameter_sums
from vae.ops.conv_gradients import ALL, cast_parameter_gradients, conv_backward
from vae.ops.library import cast_together, define_op, empty_in_layout_of, layout_of


def downsample_conv_reference(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """3x3 convolution of stride 2 over h (B, C, H, W) padded right and below: (B, C', H/2, W/2)."""
    return F.conv2d(F.pad(h, (0, 1, 0, 1)), weight.to(h.dtype), bias.to(h.dtype), stride=2)


def downsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """downsample_conv_reference without a padded copy of h, the largest tensor in it.

    The convolution is padded by 2 on every side instead. Its outputs, two pixels apart, are then those of the
    reference, with one additional row and column at the start (and one at the end for odd sides), which are
    dropped.
    """
    return _down_op(h, weight, bias)


def upsample_conv_reference(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nearest upsampling by two, then a 3x3 convolution: (B, C', 2H, 2W)."""
    h = F.interpolate(h, scale_factor=2.0, mode="nearest")
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def upsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """upsample_conv_reference as one transposed convolution: 4/9 of its arithmetic, and only h is stored.

    An upsampled pixel depends on each input pixel through a sum of taps, so the 3x3 kernel folds into a 4x4
    kernel of stride 2. The fold is computed in the parameters' own dtype.
    """
    return _up_op(h, weight, bias)


def _downsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (weight, bias), sides = cast_together((weight, bias), h.dtype), [side // 2 for side in h.shape[2:]]
    parts = bands(h.shape[0], sides[0], h.shape)
    if not parts:
        padded = F.conv2d(h, weight, bias, stride=2, padding=2)
        # dense, as the next norm needs it; this copy is a quarter as large as a padded copy of h
        return _wanted(padded, h.shape[2:]).clone(memory_format=layout_of(h))
    out = empty_in_layout_of((h.shape[0], len(weight), *sides), h)
    for band in parts:  # with one padding row below, zero at the image's edge
        padded = F.conv2d(band.of(h, below=1, scale=2), weight, bias, stride=2, padding=(0, 2))
        band.of(out).copy_(_wanted_columns(padded, sides[1]))
    return out


def _downsample_conv_backward(grad_out: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    h, weight = saved
    if bands(h.shape[0], grad_out.shape[2], h.shape):
        return _downsample_conv_backward_in_bands(grad_out, h, weight)
    grad = empty_in_layout_of((*grad_out.shape[:2], *_padded_sides(h)), h).zero_()
    _wanted(grad, h.shape[2:]).copy_(grad_out)
    grad_h, *grads = conv_backward(grad, h, weight.to(h.dtype), 2, (2, 2), ALL)
    return grad_h, *cast_parameter_gradients(grads, weight)


def _downsample_conv_backward_in_bands(
    grad_out: Tensor, h: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    cast, columns = weight.to(h.dtype), _padded_sides(h)[1]
    grad_h, sums = torch.empty_like(h), parameter_sums(weight)
    for band in bands(h.shape[0], grad_out.shape[2], h.shape):
        grad = empty_in_layout_of((1, grad_out.shape[1], band.last - band.first, columns), h).zero_()
        _wanted_columns(grad, grad_out.shape[3]).copy_(band.of(grad_out))
        part = band.of(h, below=1, scale=2)
        grad_part, *grads = conv_backward(grad, part, cast, 2, (0, 2), ALL)
        add_to(sums, grads)
        if band.first:  # the previous band also contributes to this band's first row
            grad_part[:, :, :1] += grad_h[band.images, :, 2 * band.first : 2 * band.first + 1]
        target = grad_h[band.images, :, 2 * band.first : 2 * band.last + 1]
        target.copy_(grad_part[:, :, : target.shape[2]])
    return grad_h, *cast_parameter_gradients(sums, weight)


def _padded_sides(h: Tensor) -> list[int]:
    """Rows and columns of the outputs of a stride-2 convolution of h padded by 2."""
    return [side // 2 + 1 + side % 2 for side in h.shape[2:]]


def _wanted(padded: Tensor, sides: torch.Size) -> Tensor:
    """The outputs of downsample_conv among those of the convolution padded by 2; `sides` of the input."""
    return _wanted_columns(padded[:, :, 1 : 1 + sides[0] // 2], sides[1] // 2)


def _wanted_columns(padded: Tensor, columns: int) -> Tensor:
    return padded[:, :, :, 1 : 1 + columns]


def _upsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    batch, _, rows, columns = h.shape
    folded, bias, shape = _folded(weight, h), bias.to(h.dtype), (batch, len(weight), 2 * rows, 2 * columns)
    parts = bands(batch, rows, h.shape, shape)
    if not parts:
        return F.conv_transpose2d(h, folded, bias, stride=2, padding=1)
    out = empty_in_layout_of(shape, h)
    for band in parts:  # with one row of h above and below; the 3 extra output rows on each side are cut
        result = F.conv_transpose2d(band.of(h, 1, 1), folded, bias, stride=2, padding=(3, 1))
        band.of(out, scale=2).copy_(result)
    return out


def _upsample_conv_backward(grad_out: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    h, weight = saved
    folded = _folded(weight, h)
    parts = bands(h.shape[0], h.shape[2], h.shape, grad_out.shape)
    if not parts:
        grad_h, grad_folded, grad_bias = conv_backward(grad_out, h, folded, 2, (1, 1), ALL, transposed=True)
    else:
        grad_h, (_, grad_bias) = torch.empty_like(h), parameter_sums(weight)
        grad_folded = torch.zeros_like(folded, dtype=grad_bias.dtype)
        for band in parts:
            grad, part = band.of(grad_out, 1, 1, scale=2), band.of(h)
            grad_part, of_band, _ = conv_backward(grad, part, folded, 2, (0, 1), ALL, transposed=True)
            band.of(grad_h).copy_(grad_part)
            grad_folded += of_band
            grad_bias += band.of(grad_out, scale=2).sum((0, 2, 3), dtype=grad_bias.dtype)
    return grad_h, *cast_parameter_gradients((_unfolded(grad_folded, weight), grad_bias), weight)


def _folded(weight: Tensor, h: Tensor) -> Tensor:
    """The 3x3 kernels (C', C, 3, 3) folded into those of the transposed convolution (C, C', 4, 4) of h.

    Along each side, the taps (a, b, c) become (c, b + c, a + b, a).
    """
    folded = F.avg_pool2d(weight.flip(2, 3), 2, stride=1, padding=1, divisor_override=1)
    return folded.transpose(0, 1).to(h.dtype, memory_format=layout_of(h))


def _unfolded(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the 3x3 kernels from the gradient of the folded ones."""
    grad = grad.transpose(0, 1).to(weight.dtype)
    return F.avg_pool2d(grad, 2, stride=1, divisor_override=1).flip(2, 3)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
    return inputs[:2], ()


def _down_flops(h: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    """Includes the dropped row and column: they are computed too."""
    rows, columns = (side // 2 + 1 + side % 2 for side in h[2:])
    return 2 * h[0] * rows * columns * weight.numel()


def _up_flops(h: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * h.numel() * weight[0] * 16


def _down_backward_flops(_: torch.Size, saved: Sequence[torch.Size], **__: object) -> int:
    return 2 * _down_flops(*saved)


def _up_backward_flops(_: torch.Size, saved: Sequence[torch.Size], **__: object) -> int:
    return 2 * _up_flops(*saved)


_down_op = define_op(_downsample_conv, _downsample_conv_backward, _save, _down_flops, _down_backward_flops)
_up_op = define_op(_upsample_conv, _upsample_conv_backward, _save, _up_flops, _up_backward_flops)
