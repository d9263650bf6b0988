"""Convolutions as operations that store no cast copy of their weights, with or without GroupNorm and SiLU.

With norm and SiLU, the graph stores only the input and the statistics. Backward recomputes the activation
between norm and convolution, which is as large as the input: this costs bandwidth but no convolution. Weights
are cast to the input's dtype within the operation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.conv_gradients import (
    INPUT,
    PARAMETERS,
    WEIGHT,
    cast_parameter_gradients,
    conv_backward,
)
from vae.ops.library import cast_together, once_differentiable
from vae.ops.norm import Norm, normalize, normalize_backward, normalize_with_statistics


def norm_silu_conv_reference(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> Tensor:
    """3x3 convolution of SiLU of GroupNorm of h (B, C, H, W): (B, C', H, W)."""
    h = F.silu(F.group_norm(h, groups, norm_weight.to(h.dtype), norm_bias.to(h.dtype), eps))
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def norm_silu_conv(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> Tensor:
    """The same as norm_silu_conv_reference; saves only h and the statistics (B, groups) for backward."""
    return _SameConv.apply(h, weight, bias, norm_weight, norm_bias, groups, eps)


def same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stride-1 convolution of h (B, C, H, W) with "same" padding, (B, C', H, W); saves no cast weights."""
    return _SameConv.apply(h, weight, bias, None, None, 1, 0.0)


def activated_conv_backward(
    grad_out: Tensor,
    activated: Tensor | None,
    h: Tensor,
    statistics: Tensor,
    norm: Norm,
    weight: Tensor,
    has_bias: bool = True,
) -> list[Tensor]:
    """Gradients of the convolution of `activated`, norm and SiLU of h: of its input, its weight and its bias.

    If `activated` is not stored, it is recomputed, and freed before the gradient of the input is computed.
    """
    if activated is not None:
        return conv_backward(grad_out, activated, weight, (True, True, has_bias))
    activated = normalize(h, statistics, norm)
    grads = conv_backward(grad_out, activated, weight, PARAMETERS if has_bias else WEIGHT)
    del activated
    return conv_backward(grad_out, h, weight, INPUT) + grads


class _SameConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        groups: int,
        eps: float,
    ) -> Tensor:
        activated, statistics = h, None
        if norm_weight is not None and norm_bias is not None:
            activated, statistics = normalize_with_statistics(h, Norm(norm_weight, norm_bias, groups, eps))
        ctx.save_for_backward(h, statistics, weight, norm_weight, norm_bias)
        ctx.groups = groups
        cast_weight, cast_bias = cast_together((weight, bias), h.dtype)
        return F.conv2d(activated, cast_weight, cast_bias, padding=weight.shape[2] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, statistics, weight, norm_weight, norm_bias = ctx.saved_tensors
        of_input, of_weight, of_bias, *_ = ctx.needs_input_grad  # inputs and frozen weights need no gradient
        trains = of_weight or of_bias
        grad_h: Tensor | None = None
        of_norm: list[Tensor | None] = [None, None]
        if statistics is None:
            cast = weight.to(h.dtype) if of_input else torch.empty_like(weight, dtype=h.dtype)
            grads = conv_backward(grad_out, h, cast, (of_input, trains, trains))
            if of_input:
                grad_h, *grads = grads
        else:
            norm, cast = Norm(norm_weight, norm_bias, ctx.groups, eps=0.0), weight.to(h.dtype)
            grad, *grads = activated_conv_backward(grad_out, None, h, statistics, norm, cast)
            grad_h, *of_norm, _ = normalize_backward(grad, h, statistics, norm, in_place=True)
        parameters = cast_parameter_gradients(grads, weight) if grads else (None, None)
        return grad_h, *parameters, *of_norm, None, None
