"""Convolutions as operations that store no cast copy of their weights, with or without GroupNorm and SiLU.

With norm and SiLU, the graph stores only the input and the statistics. Backward recomputes the activation
between norm and convolution, which is as large as the input: this costs bandwidth but no convolution. Weights
are cast to the input's dtype within the operation. Large images are processed in bands of rows
(vae.ops.bands), each with its own activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import bands, write
from vae.ops.conv_gradients import (
    cast_parameter_gradients,
    same_conv_input_gradient,
    same_conv_parameter_gradients,
)
from vae.ops.library import cast_together, define_op, empty_in_layout_of
from vae.ops.norm import (
    Norm,
    add_with_bias,
    norm_statistics,
    normalize,
    normalize_backward,
    normalize_with_statistics,
)


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
    return _op(h, weight, bias, norm_weight, norm_bias, groups, eps)[0]


def same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stride-1 convolution of h (B, C, H, W) with "same" padding, (B, C', H, W); saves no cast weights."""
    return _op(h, weight, bias, None, None, 1, 0.0)[0]


@dataclass(frozen=True)
class NormActivation:
    """A norm with given statistics: the activation in front of a convolution."""

    statistics: Tensor  # (2, B, groups)
    norm: Norm

    def __call__(self, h: Tensor, images: slice = slice(None)) -> Tensor:
        return normalize(h, self.statistics[:, images], self.norm)

    def backward(self, grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of h (written over `grad`), and of weight, bias and h_bias of the norm."""
        return normalize_backward(grad, h, self.statistics, self.norm, in_place=True)


def conv(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: NormActivation | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Convolution of activation(h) with "same" padding, in the dtype of h; written or added to `out`."""
    weight, *rest = cast_together([weight] if bias is None else [weight, bias], h.dtype)
    cast_bias = rest[0] if rest else None
    shape, padding = (h.shape[0], weight.shape[0], *h.shape[2:]), weight.shape[2] // 2
    parts = bands(h.shape[0], h.shape[2], h.shape, shape)
    if not parts:
        h = h if activation is None else activation(h)
        if out is not None and accumulate and bias is not None:
            return add_with_bias(out, F.conv2d(h, weight, padding=padding), bias)
        result = F.conv2d(h, weight, cast_bias, padding=padding)
        return result if out is None else write(out, result, accumulate)
    out = empty_in_layout_of(shape, h) if out is None else out
    for band in parts:
        part = band.of(h, padding, padding, activation=activation)
        write(band.of(out), F.conv2d(part, weight, cast_bias, padding=(0, padding)), accumulate)
    return out


def normalized_conv(
    h: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result, the norm's statistics, and with `keep` the activation in front of the convolution."""
    if not keep and bands(h.shape[0], h.shape[2], h.shape, (h.shape[0], len(weight), *h.shape[2:])):
        statistics = norm_statistics(h, norm)
        return conv(h, weight, bias, NormActivation(statistics, norm)), statistics, None
    activated, statistics = normalize_with_statistics(h, norm)
    return conv(activated, weight, bias), statistics, activated if keep else None


def conv_flops(pixels: int, weight_shape: torch.Size) -> int:
    """Floating-point operations of a stride-1 convolution with `pixels` output pixels over all images."""
    return 2 * pixels * weight_shape.numel()


def _same_conv(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The result, and the statistics of the norm; empty without a norm."""
    if norm_weight is None or norm_bias is None:
        return conv(h, weight, bias), h.new_empty(0)
    return normalized_conv(h, Norm(norm_weight, norm_bias, groups, eps), weight, bias)[:2]


def _same_conv_backward(
    grad_out: Tensor, saved: Sequence[Tensor], groups: int, of_input: bool, of_parameters: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h, weight, bias, and the norm's weight and bias; empty ones for those not wanted."""
    h, statistics, weight, *norm = saved
    grad_h, grad_weight, grad_bias, *norm_grads = (weight.new_empty(0) for _ in range(5))
    activation = NormActivation(statistics, Norm(norm[0], norm[1], groups, eps=0.0)) if norm else None
    if of_parameters:
        grads = same_conv_parameter_gradients(grad_out, h, weight, activation)
        grad_weight, grad_bias = cast_parameter_gradients(grads, weight)
    if of_input or activation is not None:
        grad_h = same_conv_input_gradient(grad_out, h, weight)
    if activation is not None:
        grad_h, *norm_grads, _ = activation.backward(grad_h, h)
    return grad_h, grad_weight, grad_bias, norm_grads[0], norm_grads[1]


def _flops(h: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return conv_flops(h[0] * h[2] * h[3], weight)


def _backward_flops(
    grad_out: torch.Size,
    saved: Sequence[torch.Size],
    groups: int,
    of_input: bool,
    of_parameters: bool,
    **__: object,
) -> int:
    h, _, weight, *norm = saved
    return (bool(of_input or norm) + of_parameters) * _flops(h, weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Any:
    h, weight, _, *norm, groups, _ = inputs
    of_input, *of_parameters = ctx.needs_input_grad  # network inputs and frozen weights need no gradient
    numbers = (groups, of_input, any(of_parameters[:2]))
    return (h, output[1], weight, *(parameter for parameter in norm if parameter is not None)), numbers


_op = define_op(_same_conv, _same_conv_backward, _save, _flops, _backward_flops)
