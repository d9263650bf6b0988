"""GroupNorm, SiLU and a 3x3 convolution as one operation that keeps its input and the statistics alone.

The activation between norm and convolution, as large as the input, is made again in backward: that costs
bandwidth but no convolution. Weights are cast to the input's dtype within, so that no cast copy is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.library import define_op
from vae.ops.norm import norm_statistics, normalize, normalize_backward


def norm_silu_conv_reference(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> Tensor:
    """3x3 convolution of SiLU of GroupNorm of h (B, C, H, W): (B, C', H, W). What norm_silu_conv computes."""
    h = F.silu(F.group_norm(h, groups, norm_weight.to(h.dtype), norm_bias.to(h.dtype), eps))
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def norm_silu_conv(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> Tensor:
    """norm_silu_conv_reference, of which backward needs h and the statistics (B, groups) alone."""
    return _op(h, norm_weight, norm_bias, weight, bias, groups, eps)[0]


def conv3x3(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution with padding 1 in the dtype of h."""
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def conv_input_gradient(grad_out: Tensor, like: Tensor, weight: Tensor) -> Tensor:
    """Gradient at the input of a stride-1 convolution that keeps the sides; `like` has the input's shape."""
    return _conv_backward(grad_out, like, weight, (True, False, False))[0]


def conv_weight_gradients(grad_out: Tensor, h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias of a stride-1 convolution of h that keeps the sides, in weight's dtype."""
    _, grad_weight, grad_bias = _conv_backward(grad_out, h, weight, (False, True, True))
    return grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def _conv_backward(grad_out: Tensor, h: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]):
    padding = [weight.shape[2] // 2, weight.shape[3] // 2]
    return torch.ops.aten.convolution_backward(
        grad_out, h, weight.to(h.dtype), [weight.shape[0]], [1, 1], padding, [1, 1], False, [0, 0], 1, wanted
    )


def _norm_silu_conv(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = norm_statistics(h, groups, eps)
    return conv3x3(normalize(h, mean, rstd, norm_weight, norm_bias, groups, True), weight, bias), mean, rstd


def _norm_silu_conv_backward(
    grad_out: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    activation = normalize(h, mean, rstd, norm_weight, norm_bias, groups, True)
    grad_weight, grad_bias = conv_weight_gradients(grad_out, activation, weight)
    del activation  # before its gradient, of the same size, is made
    grad = conv_input_gradient(grad_out, h, weight)
    grad_h, grad_norm_weight, grad_norm_bias = normalize_backward(
        grad, h, mean, rstd, norm_weight, norm_bias, groups, True, in_place=True
    )
    return grad_h, grad_norm_weight, grad_norm_bias, grad_weight, grad_bias


def conv_flops(pixels: int, weight_shape: torch.Size) -> int:
    """Floating-point operations of a stride-1 convolution whose output has `pixels`, those of all images."""
    return 2 * pixels * weight_shape.numel()


def _pixels(shape: torch.Size) -> int:
    return shape[0] * shape[2] * shape[3]


def _flops(h, norm_weight, norm_bias, weight, *_, **__) -> int:
    return conv_flops(_pixels(h), weight)


def _backward_flops(grad_out, h, mean, rstd, norm_weight, norm_bias, weight, *_, **__) -> int:
    return 2 * conv_flops(_pixels(h), weight)


def _save_for_backward(ctx, inputs, output):
    h, norm_weight, norm_bias, weight, _, ctx.groups, _ = inputs
    ctx.save_for_backward(h, *output[1:], norm_weight, norm_bias, weight)


def _gradients(ctx, grad_out, grad_mean, grad_rstd):
    return *_backward_op(grad_out, *ctx.saved_tensors, ctx.groups), None, None


_backward_op = define_op(_norm_silu_conv_backward, _norm_silu_conv_backward, flops=_backward_flops)
_op = define_op(_norm_silu_conv, _norm_silu_conv, _gradients, _save_for_backward, _flops)
