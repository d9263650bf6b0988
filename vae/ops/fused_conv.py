"""Convolutions as operations that store no cast copy of their weights, with or without GroupNorm and SiLU.

With norm and SiLU, the graph stores only the input and the statistics. Backward recomputes the activation
between norm and convolution, which is as large as the input: this costs bandwidth but no convolution. Weights
are cast to the input's dtype within the operation. Large images are processed in bands of rows
(vae.ops.bands), each with its own activation.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import bands, write
from vae.ops.conv_gradients import same_conv_input_gradient, same_conv_parameter_gradients
from vae.ops.library import define_op, empty_in_layout_of
from vae.ops.norm import norm_statistics, normalize, normalize_backward, normalize_with_statistics


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
    return _norm_silu_conv_op(h, norm_weight, norm_bias, weight, bias, groups, eps)[0]


def same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stride-1 convolution of h (B, C, H, W) with "same" padding, (B, C', H, W); saves no cast weights."""
    return _same_conv_op(h, weight, bias)


@dataclass(frozen=True)
class NormActivation:
    """GroupNorm with given statistics, then SiLU: the activation in front of a convolution."""

    mean: Tensor  # (B, groups), like rstd
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    groups: int

    def __call__(self, h: Tensor, images: slice = slice(None)) -> Tensor:
        return normalize(h, self.mean[images], self.rstd[images], self.weight, self.bias, self.groups, True)

    def backward(self, grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of h (written over `grad`), weight and bias."""
        return normalize_backward(
            grad, h, self.mean, self.rstd, self.weight, self.bias, self.groups, True, in_place=True
        )


def conv(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: NormActivation | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Convolution of activation(h) with "same" padding, in the dtype of h; written or added to `out`."""
    weight, bias, padding = weight.to(h.dtype), bias.to(h.dtype), weight.shape[2] // 2
    shape = (h.shape[0], weight.shape[0], *h.shape[2:])
    parts = bands(h.shape[0], h.shape[2], h.shape, shape)
    if not parts:
        result = F.conv2d(h if activation is None else activation(h), weight, bias, padding=padding)
        return result if out is None else write(out, result, accumulate)
    out = empty_in_layout_of(shape, h) if out is None else out
    for band in parts:
        part = band.of(h, padding, padding, activation=activation)
        write(band.of(out), F.conv2d(part, weight, bias, padding=(0, padding)), accumulate)
    return out


def _same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv(h, weight, bias)


def _same_conv_backward(
    grad_out: Tensor, h: Tensor, weight: Tensor, of_input: bool, of_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, weight and bias; an empty tensor for each one that is not wanted."""
    grad_h, grad_weight, grad_bias = (weight.new_empty(0) for _ in range(3))
    if of_parameters:
        grad_weight, grad_bias = same_conv_parameter_gradients(grad_out, h, weight)
    if of_input:
        grad_h = same_conv_input_gradient(grad_out, h, weight)
    return grad_h, grad_weight, grad_bias


def normalized_conv(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and rstd of the norm."""
    if bands(h.shape[0], h.shape[2], h.shape, (h.shape[0], len(weight), *h.shape[2:])):
        mean, rstd = norm_statistics(h, groups, eps)
        return conv(h, weight, bias, NormActivation(mean, rstd, norm_weight, norm_bias, groups)), mean, rstd
    activated, mean, rstd = normalize_with_statistics(h, norm_weight, norm_bias, groups, eps, silu=True)
    return conv(activated, weight, bias), mean, rstd


def _norm_silu_conv(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return normalized_conv(h, norm_weight, norm_bias, weight, bias, groups, eps)


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
    activation = NormActivation(mean, rstd, norm_weight, norm_bias, groups)
    parameter_grads = same_conv_parameter_gradients(grad_out, h, weight, activation)
    grad = same_conv_input_gradient(grad_out, h, weight)
    return *activation.backward(grad, h), *parameter_grads


def conv_flops(pixels: int, weight_shape: torch.Size) -> int:
    """Floating-point operations of a stride-1 convolution with `pixels` output pixels over all images."""
    return 2 * pixels * weight_shape.numel()


def _pixels(shape: torch.Size) -> int:
    return shape[0] * shape[2] * shape[3]


def _same_conv_flops(h: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return conv_flops(_pixels(h), weight)


def _same_conv_backward_flops(
    grad_out: torch.Size, h: torch.Size, weight: torch.Size, of_input: bool, of_parameters: bool, **_: object
) -> int:
    return (of_input + of_parameters) * conv_flops(_pixels(h), weight)


def _norm_silu_conv_flops(
    h: torch.Size,
    norm_weight: torch.Size,
    norm_bias: torch.Size,
    weight: torch.Size,
    *_: object,
    **__: object,
) -> int:
    return conv_flops(_pixels(h), weight)


def _norm_silu_conv_backward_flops(grad_out: torch.Size, h: torch.Size, *shapes: Any, **_: object) -> int:
    _, _, _, _, weight, _ = shapes  # mean, rstd, the norm's weight and bias, weight, groups
    return 2 * conv_flops(_pixels(h), weight)


def _save_norm_silu_conv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, norm_weight, norm_bias, weight, _, ctx.groups, _ = inputs
    ctx.save_for_backward(h, *output[1:], norm_weight, norm_bias, weight)


def _norm_silu_conv_gradients(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_norm_silu_conv_backward_op(grad_out, *ctx.saved_tensors, ctx.groups), None, None


def _save_same_conv(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _same_conv_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    of_input, *of_parameters = ctx.needs_input_grad  # network inputs and frozen weights need no gradient
    grads = _same_conv_backward_op(grad_out, *ctx.saved_tensors, of_input, any(of_parameters))
    return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=True))


_same_conv_backward_op = define_op(_same_conv_backward, _same_conv_backward, flops=_same_conv_backward_flops)
_same_conv_op = define_op(_same_conv, _same_conv, _same_conv_gradients, _save_same_conv, _same_conv_flops)
_norm_silu_conv_backward_op = define_op(
    _norm_silu_conv_backward, _norm_silu_conv_backward, flops=_norm_silu_conv_backward_flops
)
_norm_silu_conv_op = define_op(
    _norm_silu_conv, _norm_silu_conv, _norm_silu_conv_gradients, _save_norm_silu_conv, _norm_silu_conv_flops
)
