"""A whole residual block as one operation.

One operation needs few launches: weights are cast together, and the biases are added within the second norm
and the final sum. Backward has what `recompute` leaves:

none         x, the inner h and both activations are stored
activations  x and h are stored; backward recomputes the activations
block        only x is stored; backward also recomputes the first convolution

Each tensor is freed after its last use. For large images (vae.ops.bands), activations that are not stored are
computed in bands of rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import bands
from vae.ops.conv_gradients import WEIGHT, same_conv_input_gradient, same_conv_parameter_gradients
from vae.ops.fused_conv import NormActivation, conv, conv_flops, norm_silu_conv_reference, normalized_conv
from vae.ops.library import cast_together, define_op
from vae.ops.norm import Norm, add_with_bias


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


def residual_block(
    x: Tensor, parameters: Sequence[Tensor], groups: int, eps: float, recompute: str = "block"
) -> Tensor:
    """The same as residual_block_reference; `recompute`: "none", "activations" or "block"."""
    recompute = recompute if torch.is_grad_enabled() else "block"
    no_shortcut = (None,) * (10 - len(parameters))
    return _op(x, *parameters, *no_shortcut, groups, eps, recompute)[0]


def _residual_block(
    x: Tensor,
    gamma1: Tensor,
    beta1: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    gamma2: Tensor,
    beta2: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    weight3: Tensor | None,
    bias3: Tensor | None,
    groups: int,
    eps: float,
    recompute: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, the statistics of both norms, h and both activations; empty if they are not stored."""
    keep = recompute == "none"
    cast1, cast2, *cast3 = cast_together([w for w in (weight1, weight2, weight3) if w is not None], x.dtype)
    norm1, norm2 = Norm(gamma1, beta1, groups, eps), Norm(gamma2, beta2, groups, eps, h_bias=bias1)
    h, statistics1, activated1 = normalized_conv(x, norm1, cast1, keep=keep)
    out, statistics2, activated2 = normalized_conv(h, norm2, cast2, keep=keep)
    if recompute == "block":
        h = x.new_empty(0)
    if cast3 and bias3 is not None:
        conv(x, cast3[0], bias2 + bias3, out=out, accumulate=True)
    else:
        add_with_bias(out, x, bias2)
    activated1, activated2 = (x.new_empty(0) if t is None else t for t in (activated1, activated2))
    return out, statistics1, statistics2, h, activated1, activated2


def _residual_block_backward(grad_out: Tensor, saved: Sequence[Tensor], groups: int) -> list[Tensor]:
    """Gradients of x and of the parameters, in their order."""
    x, statistics1, statistics2, h, activated1, activated2, *parameters = saved
    gamma1, beta1, weight1, bias1, gamma2, beta2, weight2, _, *shortcut = parameters
    cast1, cast2, *cast3 = cast_together([weight1, weight2, *shortcut[:1]], x.dtype)
    norm1 = NormActivation(statistics1, Norm(gamma1, beta1, groups, eps=0.0))
    norm2 = NormActivation(statistics2, Norm(gamma2, beta2, groups, eps=0.0, h_bias=bias1))
    buffer, buffer_head, buffer_tail = (None, None, None) if h.numel() else _shared_buffer(x, grad_out)
    if not h.numel():
        h = conv(x, cast1, None, norm1, out=buffer_head)
    inner = (activated2, None) if activated2.numel() else (h, norm2)
    grad_weight2, grad_bias2 = same_conv_parameter_gradients(grad_out, inner[0], cast2, inner[1])
    del inner
    grad = same_conv_input_gradient(grad_out, h, cast2, out=buffer_tail)
    grad, grad_gamma2, grad_beta2, grad_bias1 = norm2.backward(grad, h)
    assert grad_bias1 is not None
    del h
    inner = (activated1, None) if activated1.numel() else (x, norm1)
    (grad_weight1,) = same_conv_parameter_gradients(grad, inner[0], cast1, inner[1], WEIGHT)
    grad, grad_gamma1, grad_beta1, _ = norm1.backward(same_conv_input_gradient(grad, x, cast1, out=buffer), x)
    grads = [grad_gamma1, grad_beta1, grad_weight1, grad_bias1]
    grads += [grad_gamma2, grad_beta2, grad_weight2, grad_bias2]
    if shortcut:
        grads += [*same_conv_parameter_gradients(grad_out, x, cast3[0], None, WEIGHT), grad_bias2.clone()]
        grad = same_conv_input_gradient(grad_out, x, cast3[0], out=grad, accumulate=True)
    else:
        grad += grad_out
    return [grad, *cast_together(grads, weight1.dtype, like=parameters)]


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


def _flops(x: torch.Size, *shapes: Any, **_: object) -> int:
    pixels = x[0] * x[2] * x[3]
    return sum(
        conv_flops(pixels, shape) for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4
    )


def _backward_flops(_: torch.Size, saved: Sequence[torch.Size], *__: object, **___: object) -> int:
    x, _, _, h, _, _, *parameters = saved
    recomputed = 0 if h.numel() else conv_flops(x[0] * x[2] * x[3], parameters[2])
    return 2 * _flops(x, *parameters) + recomputed


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> Any:
    x, *parameters, groups, _, _ = inputs
    return (x, *output[1:], *(p for p in parameters if p is not None)), (groups,)


_op = define_op(_residual_block, _residual_block_backward, _save, _flops, _backward_flops)
