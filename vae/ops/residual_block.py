"""A whole residual block as one operation that stores only its input and the statistics of its norms.

Backward recomputes the first convolution and both activations, and frees each of them after its last use. For
large images (vae.ops.bands) activations are computed in bands of rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import bands
from vae.ops.conv_gradients import same_conv_input_gradient, same_conv_parameter_gradients
from vae.ops.fused_conv import NormActivation, conv, conv_flops, norm_silu_conv_reference, normalized_conv
from vae.ops.library import define_op


def residual_block_reference(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> Tensor:
    """norm-SiLU-conv twice over x (B, C, H, W), added to x: (B, C', H, W).

    `parameters`: weight and bias of norm1, conv1, norm2, conv2 and, if C' is not C, of the 1x1 shortcut.
    """
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, bias2, *shortcut = parameters
    h = norm_silu_conv_reference(x, gamma1, beta1, weight1, bias1, groups, eps)
    h = norm_silu_conv_reference(h, gamma2, beta2, weight2, bias2, groups, eps)
    if shortcut:
        weight, bias = shortcut
        x = F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype))
    return x + h


def residual_block(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> Tensor:
    """The same as residual_block_reference; saves only x and the statistics (B, groups) for backward."""
    return _op(x, parameters, groups, eps)[0]


def _residual_block(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> list[Tensor]:
    """The block's output, then mean and rstd of the first norm and of the second norm."""
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, bias2, *shortcut = parameters
    h, mean1, rstd1 = normalized_conv(x, gamma1, beta1, weight1, bias1, groups, eps)
    h, mean2, rstd2 = normalized_conv(h, gamma2, beta2, weight2, bias2, groups, eps)
    h = conv(x, shortcut[0], shortcut[1], out=h, accumulate=True) if shortcut else h.add_(x)
    return [h, mean1, rstd1, mean2, rstd2]


def _residual_block_backward(
    grad_out: Tensor, x: Tensor, statistics: Sequence[Tensor], parameters: Sequence[Tensor], groups: int
) -> list[Tensor]:
    """Gradients of x and of `parameters`, in their order."""
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, _, *shortcut = parameters
    mean1, rstd1, mean2, rstd2 = statistics
    activation1 = NormActivation(mean1, rstd1, gamma1, beta1, groups)
    activation2 = NormActivation(mean2, rstd2, gamma2, beta2, groups)
    buffer, buffer_head, buffer_tail = _shared_buffer(x, grad_out)
    h = conv(x, weight1, bias1, activation1, out=buffer_head)
    grads2 = same_conv_parameter_gradients(grad_out, h, weight2, activation2)
    grad = same_conv_input_gradient(grad_out, h, weight2, out=buffer_tail)
    grad, *norm_grads2 = activation2.backward(grad, h)
    del h
    grads1 = same_conv_parameter_gradients(grad, x, weight1, activation1)
    grad = same_conv_input_gradient(grad, x, weight1, out=buffer)
    grad, *norm_grads1 = activation1.backward(grad, x)
    grads = [*norm_grads1, *grads1, *norm_grads2, *grads2]
    if shortcut:
        grads += same_conv_parameter_gradients(grad_out, x, shortcut[0])
        grad = same_conv_input_gradient(grad_out, x, shortcut[0], out=grad, accumulate=True)
    else:
        grad += grad_out
    return [grad, *grads]


def _shared_buffer(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """A buffer shaped like `x`, with head and tail views shaped like `h`; None if bands cannot share it.

    If x is at least twice as wide as h, then h and its gradient use the memory of the gradient of x. The
    gradient of x reaches a row of theirs only after that row was read. Channels last only: there a row of x
    or h is one block of memory with all its channels.
    """
    if not bands(len(x), x.shape[2], x.shape) or x.shape[1] < 2 * h.shape[1]:
        return None, None, None
    _, channels, height, width = h.shape
    image = channels * height * width
    strides = (image, 1, width * channels, channels)
    if x.is_contiguous():
        if not x.is_meta:
            return None, None, None
        strides = (image, height * width, width, 1)  # convolutions on meta forget the layout
    buffer = torch.empty_like(x)
    head, tail = (buffer.as_strided(h.shape, strides, start) for start in (0, x.numel() - h.numel()))
    return buffer, head, tail


def _flops(x: torch.Size, parameters: Sequence[torch.Size], *_: object, **__: object) -> int:
    pixels = x[0] * x[2] * x[3]
    return sum(conv_flops(pixels, shape) for shape in parameters if len(shape) == 4)


def _backward_flops(
    grad_out: torch.Size,
    x: torch.Size,
    statistics: object,
    parameters: Sequence[torch.Size],
    *_: object,
    **__: object,
) -> int:
    recomputed = conv_flops(x[0] * x[2] * x[3], parameters[2])
    return 2 * _flops(x, parameters) + recomputed


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, parameters, ctx.groups, _ = inputs
    ctx.save_for_backward(x, *output[1:], *parameters)


def _gradients(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], None, None]:
    x, *saved = ctx.saved_tensors
    grad_x, *rest = _backward_op(grads[0], x, saved[:4], saved[4:], ctx.groups)
    return grad_x, rest, None, None


_backward_op = define_op(_residual_block_backward, _residual_block_backward, flops=_backward_flops)
_op = define_op(_residual_block, _residual_block, _gradients, _save_for_backward, _flops)
