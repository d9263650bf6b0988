"""Convolutions as operations that store no cast copy of their weights, with or without GroupNorm and SiLU.

With norm and SiLU, the graph stores only the input and the statistics. Backward recomputes the activation
between norm and convolution, which is as large as the input: this costs bandwidth but no convolution. Weights
are cast to the input's dtype within the operation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vae.ops.conv_gradients import INPUT, PARAMETERS, cast_parameter_gradients, conv_backward
from vae.ops.library import cast_together
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
        norm = None if statistics is None else Norm(norm_weight, norm_bias, ctx.groups, eps=0.0)
        of_input, *of_parameters = ctx.needs_input_grad  # network inputs and frozen weights need no gradient
        of_input = of_input or norm is not None
        cast = weight.to(h.dtype) if of_input else torch.empty_like(weight, dtype=h.dtype)
        grads: list[Tensor | None] = [None] * 5
        if any(of_parameters[:2]):
            activated = h if norm is None else normalize(h, statistics, norm)
            of_conv = conv_backward(grad_out, activated, cast, PARAMETERS)
            grads[1:3] = cast_parameter_gradients(of_conv, weight)
            del activated
        if of_input:
            (grad,) = conv_backward(grad_out, h, cast, INPUT)
            grads[0] = grad
            if norm is not None:
                grads[0], *grads[3:], _ = normalize_backward(grad, h, statistics, norm, in_place=True)
        return *grads, None, None
