"""Downsampling and upsampling by two, each with its 3x3 convolution, as operations that store only the input.

Weights are cast to the input's dtype (and folded) within the operation, in both directions: no cast copy is
stored.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.conv_gradients import ALL, cast_parameter_gradients, conv_backward
from vae.ops.library import cast_together, empty_in_layout_of, layout_of, once_differentiable


def downsample_conv_reference(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """3x3 convolution of stride 2 over h (B, C, H, W) padded right and below: (B, C', H/2, W/2)."""
    return F.conv2d(F.pad(h, (0, 1, 0, 1)), weight.to(h.dtype), bias.to(h.dtype), stride=2)


def downsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """downsample_conv_reference without a padded copy of h, the largest tensor in it.

    The convolution is padded by 2 on every side instead. Its outputs, two pixels apart, are then those of the
    reference, with one additional row and column at the start (and one at the end for odd sides), which are
    dropped.
    """
    return _DownsampleConv.apply(h, weight, bias)


def upsample_conv_reference(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nearest upsampling by two, then a 3x3 convolution: (B, C', 2H, 2W)."""
    h = F.interpolate(h, scale_factor=2.0, mode="nearest")
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def upsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """upsample_conv_reference as one transposed convolution: 4/9 of its arithmetic, and only h is stored.

    An upsampled pixel depends on each input pixel through a sum of taps, so the 3x3 kernel folds into a 4x4
    kernel of stride 2. The fold is computed in the parameters' own dtype.
    """
    return _UpsampleConv.apply(h, weight, bias)


class _DownsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        cast_weight, cast_bias = cast_together((weight, bias), h.dtype)
        padded = F.conv2d(h, cast_weight, cast_bias, stride=2, padding=2)
        # dense, as the next norm needs it; this copy is a quarter as large as a padded copy of h
        return _wanted(padded, h.shape[2:]).clone(memory_format=layout_of(h))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        h, weight = ctx.saved_tensors
        sides = [side // 2 + 1 + side % 2 for side in h.shape[2:]]
        grad = empty_in_layout_of((*grad_out.shape[:2], *sides), h).zero_()
        _wanted(grad, h.shape[2:]).copy_(grad_out)
        grad_h, *grads = conv_backward(grad, h, weight.to(h.dtype), ALL, stride=2, padding=2)
        return grad_h, *cast_parameter_gradients(grads, weight)


def _wanted(padded: Tensor, sides: torch.Size) -> Tensor:
    """The outputs of downsample_conv among those of the convolution padded by 2; `sides` of the input."""
    return padded[:, :, 1 : 1 + sides[0] // 2, 1 : 1 + sides[1] // 2]


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return F.conv_transpose2d(h, _folded(weight, h), bias.to(h.dtype), stride=2, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        h, weight = ctx.saved_tensors
        folded = _folded(weight, h)
        grad_h, grad_folded, grad_bias = conv_backward(
            grad_out, h, folded, ALL, stride=2, padding=1, transposed=True
        )
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
