"""A whole residual block as one operation that keeps its input and the statistics of its norms alone.

Backward runs the first convolution again and both activations, and frees each as soon as it is used; of
large images (vae.ops.bands) activations are made in bands of rows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import bands
from vae.ops.fused_conv import (
    KnownNormSiLU,
    conv,
    conv_flops,
    conv_input_gradient,
    conv_parameter_gradients,
    norm_silu_conv_reference,
)
from vae.ops.library import define_op
from vae.ops.norm import norm_statistics


def residual_block_reference(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> Tensor:
    """norm-SiLU-conv twice over x (B, C, H, W), added to x: (B, C', H, W). What residual_block computes.

    `parameters`: weight and bias of norm1, conv1, norm2, conv2 and, where C' is not C, of the 1x1 shortcut.
    """
    h = norm_silu_conv_reference(x, *parameters[:4], groups, eps)
    h = norm_silu_conv_reference(h, *parameters[4:8], groups, eps)
    if len(parameters) > 8:
        weight, bias = parameters[8:]
        x = F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype))
    return x + h


def residual_block(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> Tensor:
    """residual_block_reference, of which backward needs x and the statistics (B, groups) alone."""
    return _op(x, parameters, groups, eps)[0]


def _residual_block(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> list[Tensor]:
    """The block's output, then mean and rstd of its first and of its second norm."""
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, bias2, *shortcut = parameters
    mean1, rstd1 = norm_statistics(x, groups, eps)
    h = conv(x, weight1, bias1, KnownNormSiLU(mean1, rstd1, gamma1, beta1, groups))
    mean2, rstd2 = norm_statistics(h, groups, eps)
    h = conv(h, weight2, bias2, KnownNormSiLU(mean2, rstd2, gamma2, beta2, groups))
    h = conv(x, *shortcut, into=h, add=True) if shortcut else h.add_(x)
    return [h, mean1, rstd1, mean2, rstd2]


def _residual_block_backward(
    grad_out: Tensor, x: Tensor, statistics: Sequence[Tensor], parameters: Sequence[Tensor], groups: int
) -> list[Tensor]:
    """Gradients of x and of `parameters`, in their order."""
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, _, *shortcut = parameters
    mean1, rstd1, mean2, rstd2 = statistics
    activation1 = KnownNormSiLU(mean1, rstd1, gamma1, beta1, groups)
    activation2 = KnownNormSiLU(mean2, rstd2, gamma2, beta2, groups)
    room, room_h, room_grad = _shared_room(x, grad_out)
    h = conv(x, weight1, bias1, activation1, into=room_h)
    grads2 = conv_parameter_gradients(grad_out, h, weight2, activation2)
    grad = conv_input_gradient(grad_out, h, weight2, into=room_grad)
    grad, *norm_grads2 = activation2.backward(grad, h)
    del h
    grads1 = conv_parameter_gradients(grad, x, weight1, activation1)
    grad = conv_input_gradient(grad, x, weight1, into=room)
    grad, *norm_grads1 = activation1.backward(grad, x)
    shortcut_grads = []
    if shortcut:
        shortcut_grads = conv_parameter_gradients(grad_out, x, shortcut[0])
        grad = conv_input_gradient(grad_out, x, shortcut[0], into=grad, add=True)
    else:
        grad += grad_out
    return [grad, *norm_grads1, *grads1, *norm_grads2, *grads2, *shortcut_grads]


def _shared_room(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """Room like x whose first part has h's shape, and so has its last, where bands may share it.

    Of a block that is at least twice as wide at x as at h, the latter and its gradient lie where the
    gradient of x will be: by the time its rows reach those of the other they are read. Channels last only,
    where a row of each takes the room of that row in all channels.
    """
    if not bands(len(x), x.shape[2], x.shape) or x.shape[1] < 2 * h.shape[1]:
        return None, None, None
    _, channels, height, width = h.shape
    image = channels * height * width
    strides = (image, 1, width * channels, channels)
    if x.is_contiguous():
        if not x.is_meta:
            return None, None, None
        strides = (image, height * width, width, 1)  # convolutions there forget the layout
    room = torch.empty_like(x)
    first, last = (room.as_strided(h.shape, strides, start) for start in (0, x.numel() - h.numel()))
    return room, first, last


def _flops(x, parameters, *_, **__) -> int:
    pixels = x[0] * x[2] * x[3]
    return sum(conv_flops(pixels, shape) for shape in parameters if len(shape) == 4)


def _backward_flops(grad_out, x, statistics, parameters, *_, **__) -> int:
    first = conv_flops(x[0] * x[2] * x[3], parameters[2])  # made again
    return 2 * _flops(x, parameters) + first


def _save_for_backward(ctx, inputs, output):
    x, parameters, ctx.groups, _ = inputs
    ctx.save_for_backward(x, *output[1:], *parameters)


def _gradients(ctx, grads):
    x, *saved = ctx.saved_tensors
    grad_x, *rest = _backward_op(grads[0], x, saved[:4], saved[4:], ctx.groups)
    return grad_x, rest, None, None


_backward_op = define_op(_residual_block_backward, _residual_block_backward, flops=_backward_flops)
_op = define_op(_residual_block, _residual_block, _gradients, _save_for_backward, _flops)
