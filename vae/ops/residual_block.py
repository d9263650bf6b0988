"""A whole residual block as one operation.

One operation needs few launches: weights are cast together, and the biases are added within the second norm
and the final sum. In backward, the norms also sum the gradients of biases and add the gradient around the
block, if its width does not change. Backward has what `recompute` leaves:

none         x, the inner h and both activations are stored
activations  x and h are stored; backward recomputes the activations
block        only x is stored; backward also recomputes the first convolution

Each tensor is freed after its last use.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.fused_conv import (
    WEIGHT,
    activated_conv_backward,
    add_pointwise_input_gradient,
    conv_backward,
    norm_silu_conv_reference,
)
from vae.ops.library import cast_together, once_differentiable
from vae.ops.norm import Norm, add_with_bias, normalize, normalize_backward, normalize_with_statistics


def residual_block_reference(x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float) -> Tensor:
    """norm-SiLU-conv twice over x (B, C, H, W), added to x: (B, C', H, W).

    `parameters`: weight and bias of norm1, conv1, norm2, conv2 and, if C' is not C, of the 1x1 shortcut. The
    biases of RMS norms are None.
    """
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, bias2, *shortcut = parameters
    h = norm_silu_conv_reference(x, gamma1, beta1, weight1, bias1, groups, eps)
    h = norm_silu_conv_reference(h, gamma2, beta2, weight2, bias2, groups, eps)
    if shortcut:
        weight, bias = shortcut
        x = F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype))
    return x + h


def residual_block(
    x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float, recompute: str = "block"
) -> Tensor:
    """Compute residual_block_reference; `recompute`: "none", "activations" or "block"."""
    recompute = recompute if torch.is_grad_enabled() else "block"
    return _ResidualBlock.apply(x, groups, eps, recompute, *parameters)


class _ResidualBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, eps: float, recompute: str, *parameters: Tensor) -> Tensor:
        gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, bias2, *shortcut = parameters
        cast1, cast2, *cast3 = cast_together([weight1, weight2, *shortcut[:1]], x.dtype)
        norm1, norm2 = Norm(gamma1, beta1, groups, eps), Norm(gamma2, beta2, groups, eps, h_bias=bias1)
        activated, statistics1 = normalize_with_statistics(x, norm1)
        h = F.conv2d(activated, cast1, padding=1)
        stored: list[Tensor | None] = [None if recompute == "block" else h]
        stored.append(activated if recompute == "none" else None)
        del activated
        activated, statistics2 = normalize_with_statistics(h, norm2)
        stored.append(activated if recompute == "none" else None)
        del h
        out = F.conv2d(activated, cast2, padding=1)
        del activated
        ctx.save_for_backward(x, statistics1, statistics2, *stored, *parameters)
        ctx.groups = groups
        if shortcut:
            return add_with_bias(out, F.conv2d(x, cast3[0]), bias2 + shortcut[1])
        return add_with_bias(out, x, bias2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, statistics1, statistics2, h, activated1, activated2, *parameters = ctx.saved_tensors
        gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, bias2, *shortcut = parameters
        cast1, cast2, *cast3 = cast_together([weight1, weight2, *shortcut[:1]], x.dtype)
        norm1 = Norm(gamma1, beta1, ctx.groups, eps=0.0)
        norm2 = Norm(gamma2, beta2, ctx.groups, eps=0.0, h_bias=bias1)
        if h is None:
            h = F.conv2d(normalize(x, statistics1, norm1), cast1, padding=1)
        grad, grad_weight2, *of_bias2 = activated_conv_backward(
            grad_out, activated2, h, statistics2, norm2, cast2, has_bias=bool(shortcut)
        )
        del activated2
        grad, grad_gamma2, grad_beta2, grad_bias1 = normalize_backward(
            grad, h, statistics2, norm2, in_place=True
        )
        del h
        grad, grad_weight1 = activated_conv_backward(
            grad, activated1, x, statistics1, norm1, cast1, has_bias=False
        )
        del activated1
        grad, grad_gamma1, grad_beta1, skip_sums = normalize_backward(
            grad, x, statistics1, norm1, in_place=True, skip=None if shortcut else grad_out
        )
        of_convs, like = [grad_weight1, grad_weight2, *of_bias2], [weight1, weight2, bias2]
        if shortcut:
            of_convs += [*conv_backward(grad_out, x, cast3[0], WEIGHT), of_bias2[0].clone()]
            add_pointwise_input_gradient(grad, grad_out, cast3[0])
        else:
            of_convs.append(skip_sums)
        of_convs = cast_together(of_convs, weight1.dtype, like=[*like, *shortcut])
        grad_weight1, grad_weight2, grad_bias2, *of_shortcut = of_convs
        first = (grad_gamma1, grad_beta1, grad_weight1, grad_bias1)
        second = (grad_gamma2, grad_beta2, grad_weight2, grad_bias2)
        return grad, None, None, None, *first, *second, *of_shortcut
