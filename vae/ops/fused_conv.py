"""Convolutions as operations that keep no copy of their weights; one with GroupNorm and SiLU in front of it.

Of the latter the graph keeps its input and the statistics alone: the activation between norm and convolution,
as large as the input, is made again in backward, which costs bandwidth but no convolution. Weights are cast
to the input's dtype within. Large images go in bands of rows (vae.ops.bands), each with its own activation.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import add_to, bands, parameter_sums
from vae.ops.conv_backward import conv_backward, like_parameters
from vae.ops.layout import empty_in_layout_of
from vae.ops.library import define_op
from vae.ops.norm import norm_statistics, normalize, normalize_backward
from vae.ops.weight_gradient import conv_weight_gradient


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


class KnownNormSiLU(NamedTuple):
    """Normalisation by known statistics, then SiLU: the activation in front of a convolution."""

    mean: Tensor  # (B, groups), as rstd
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    groups: int

    def __call__(self, h: Tensor, images: slice = slice(None)) -> Tensor:
        return normalize(h, self.mean[images], self.rstd[images], self.weight, self.bias, self.groups, True)

    def backward(self, grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of h, written over `grad`, and of weight and bias."""
        arguments = (self.mean, self.rstd, self.weight, self.bias, self.groups, True)
        return normalize_backward(grad, h, *arguments, in_place=True)


def conv(
    h: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: KnownNormSiLU | None = None,
    into: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Convolution that keeps the sides of activation(h), in the dtype of h; into or on top of `into`."""
    weight, bias, halo = weight.to(h.dtype), bias.to(h.dtype), weight.shape[2] // 2
    shape = (h.shape[0], weight.shape[0], *h.shape[2:])
    parts = bands(h.shape[0], h.shape[2], h.shape, shape)
    if not parts:
        out = F.conv2d(h if activation is None else activation(h), weight, bias, padding=halo)
        return out if into is None else _write(into, out, add)
    out = empty_in_layout_of(shape, h) if into is None else into
    for band in parts:
        part = band.of(h, halo, halo, activation=activation)
        _write(band.of(out), F.conv2d(part, weight, bias, padding=(0, halo)), add)
    return out


def same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution of h (B, C, H, W) that keeps its sides, (B, C', H, W), of which backward needs h alone."""
    return _conv_op(h, weight, bias)


def conv_input_gradient(
    grad_out: Tensor, like: Tensor, weight: Tensor, into: Tensor | None = None, add: bool = False
) -> Tensor:
    """Gradient at the input of a stride-1 convolution that keeps the sides; `like` has the input's shape.

    Bands are written in the order of rows, and none is written before the rows up to its own are read.
    """
    parts = bands(like.shape[0], like.shape[2], grad_out.shape, like.shape)
    size, halo = weight.shape[2], weight.shape[2] // 2
    if not parts:
        grad = _input_gradient(grad_out, like, weight, halo)
        return grad if into is None else _write(into, grad, add)
    grad = empty_in_layout_of(like.shape, like) if into is None else into
    for band in parts:
        found = _input_gradient(band.of(grad_out, halo, halo), band.of(like), weight, size - 1)
        _write(band.of(grad), found, add)
    return grad


def conv_parameter_gradients(
    grad_out: Tensor, h: Tensor, weight: Tensor, activation: KnownNormSiLU | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias of a stride-1 convolution of activation(h) that keeps the sides.

    In weight's dtype and layout; those of bands are added up in it, fp32 where it is less.
    """
    parts, halo = bands(h.shape[0], h.shape[2], grad_out.shape, h.shape), weight.shape[2] // 2
    if not parts:
        grads = conv_weight_gradient(grad_out, h, weight, padding=(halo, halo), activation=activation)
        return like_parameters(grads, weight)
    sums = parameter_sums(weight)
    for band in parts:
        part = band.of(h, halo, halo, activation=activation)
        add_to(sums, conv_weight_gradient(band.of(grad_out), part, weight, padding=(0, halo)))
    return like_parameters(sums, weight)


def _input_gradient(grad_out: Tensor, h: Tensor, weight: Tensor, padded_rows: int) -> Tensor:
    """Gradient at the input h, of which nothing but the shape is read."""
    padding = (padded_rows, weight.shape[3] // 2)
    return conv_backward(grad_out, h, weight.to(h.dtype), 1, padding, (True, False, False))[0]


def _write(target: Tensor, values: Tensor, add: bool) -> Tensor:
    return target.add_(values) if add else target.copy_(values)


def _same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv(h, weight, bias)


def _same_conv_backward(
    grad_out: Tensor, h: Tensor, weight: Tensor, of_input: bool, of_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, weight and bias, empty tensors for those that are not wanted."""
    grads = [weight.new_empty(0) for _ in range(3)]
    if of_parameters:
        grads[1:] = conv_parameter_gradients(grad_out, h, weight)
    if of_input:
        grads[0] = conv_input_gradient(grad_out, h, weight)
    return tuple(grads)


def _norm_silu_conv(
    h: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = norm_statistics(h, groups, eps)
    return conv(h, weight, bias, KnownNormSiLU(mean, rstd, norm_weight, norm_bias, groups)), mean, rstd


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
    activation = KnownNormSiLU(mean, rstd, norm_weight, norm_bias, groups)
    weight_grads = conv_parameter_gradients(grad_out, h, weight, activation)
    grad = conv_input_gradient(grad_out, h, weight)
    return *activation.backward(grad, h), *weight_grads


def conv_flops(pixels: int, weight_shape: torch.Size) -> int:
    """Floating-point operations of a stride-1 convolution whose output has `pixels`, those of all images."""
    return 2 * pixels * weight_shape.numel()


def _pixels(shape: torch.Size) -> int:
    return shape[0] * shape[2] * shape[3]


def _conv_flops(h, weight, *_, **__) -> int:
    return conv_flops(_pixels(h), weight)


def _conv_backward_flops(grad_out, h, weight, of_input, of_parameters, **__) -> int:
    return (of_input + of_parameters) * conv_flops(_pixels(h), weight)


def _flops(h, norm_weight, norm_bias, weight, *_, **__) -> int:
    return conv_flops(_pixels(h), weight)


def _backward_flops(grad_out, h, mean, rstd, norm_weight, norm_bias, weight, *_, **__) -> int:
    return 2 * conv_flops(_pixels(h), weight)


def _save_for_backward(ctx, inputs, output):
    h, norm_weight, norm_bias, weight, _, ctx.groups, _ = inputs
    ctx.save_for_backward(h, *output[1:], norm_weight, norm_bias, weight)


def _gradients(ctx, grad_out, grad_mean, grad_rstd):
    return *_backward_op(grad_out, *ctx.saved_tensors, ctx.groups), None, None


def _save_conv(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _conv_gradients(ctx, grad_out):
    of_input, *of_parameters = ctx.needs_input_grad  # images need none, nor do frozen weights
    grads = _conv_backward_op(grad_out, *ctx.saved_tensors, of_input, any(of_parameters))
    return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=True))


_conv_backward_op = define_op(_same_conv_backward, _same_conv_backward, flops=_conv_backward_flops)
_conv_op = define_op(_same_conv, _same_conv, _conv_gradients, _save_conv, _conv_flops)
_backward_op = define_op(_norm_silu_conv_backward, _norm_silu_conv_backward, flops=_backward_flops)
_op = define_op(_norm_silu_conv, _norm_silu_conv, _gradients, _save_for_backward, _flops)
