"""Convolutions as operations that store no cast copy of their weights, with or without GroupNorm and SiLU.

With norm and SiLU, the graph stores only the input and the statistics. Backward recomputes the activation
between norm and convolution, which is as large as the input: this costs bandwidth but no convolution. Weights
are cast to the input's dtype within the operation.

norm_silu_conv is the end of encoder and decoder. The constants that its inputs and weights may have cancel in
its result, and half precision would round both (benchmarks/LOG.md): it computes forward in `end_dtype`.
"""

from collections.abc import Callable
from functools import partial
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
from vae.ops.library import cast_together, has_no_data, once_differentiable
from vae.ops.norm import Norm, normalize, normalize_backward, normalize_with_statistics
from vae.ops.rms_norm import rms_norm_reference


def norm_silu_conv_reference(
    h: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
) -> Tensor:
    """3x3 convolution of SiLU of GroupNorm of h (B, C, H, W): (B, C', H, W).

    Without `norm_bias`, of the RMS norm.
    """
    if norm_bias is None:
        h = rms_norm_reference(h, norm_weight, silu=True)
    else:
        h = F.silu(F.group_norm(h, groups, norm_weight.to(h.dtype), norm_bias.to(h.dtype), eps))
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def norm_silu_conv(
    h: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
) -> Tensor:
    """The same as norm_silu_conv_reference, with a forward in `end_dtype` before the result is rounded.

    It saves only h and the statistics (B, groups) for backward, which computes in h's dtype.
    """
    return _NormSiLUConv.apply(h, norm_weight, norm_bias, weight, bias, groups, eps, end_dtype(h))


def end_dtype(h: Tensor) -> torch.dtype:
    """What norm_silu_conv computes in: after half precision fp32, or fp16 with gradients; else h's dtype.

    fp16 has as many bytes as bf16, and as many bits of mantissa as TF32: 10 instead of 7. It is safe for what
    is bounded: normalized values, weights and results. Gradients, which could underflow, stay in bf16. fp32
    has twice the bytes, which a step cannot spare. A CPU has fp32 instead of fp16 after bf16.
    """
    if h.element_size() != 2:
        return h.dtype
    emulates_fp16 = h.dtype == torch.bfloat16 and h.device.type == "cpu" and not has_no_data(h)
    return torch.float32 if emulates_fp16 or not torch.is_grad_enabled() else torch.float16


def convolve_end(convolve: Callable[[Tensor], Tensor], activated: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`convolve` of an end's activated values (B, C, H, W), which may be finer than its result, `out_dtype`.

    If they are fp32 and the result has half precision, the convolution does not use TF32, which has no more
    bits than fp16. `fp32_precision` says so, because `allow_tf32` cannot be read in a program that uses the
    newer settings. A context manager would run frames of Python's `contextlib`, which torch.compile compiles.
    """
    if activated.element_size() <= out_dtype.itemsize:
        return convolve(activated).to(out_dtype)
    backend = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # of a class in place of the module
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        return convolve(activated).to(out_dtype)
    finally:
        backend.fp32_precision = before


def same_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stride-1 convolution of h (B, C, H, W) with "same" padding, (B, C', H, W); saves no cast weights."""
    return _SameConv.apply(h, weight, bias)


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
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        cast_weight, cast_bias = cast_together((weight, bias), h.dtype)
        return F.conv2d(h, cast_weight, cast_bias, padding=weight.shape[2] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad  # inputs and frozen weights need no gradient
        trains = of_weight or of_bias
        grad_h: Tensor | None = None
        cast = weight.to(h.dtype) if of_input else torch.empty_like(weight, dtype=h.dtype)
        grads = conv_backward(grad_out, h, cast, (of_input, trains, trains))
        if of_input:
            grad_h, *grads = grads
        parameters = cast_parameter_gradients(grads, weight) if grads else (None, None)
        return grad_h, *parameters


class _NormSiLUConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        norm = Norm(norm_weight, norm_bias, groups, eps, out_dtype=dtype)
        activated, statistics = normalize_with_statistics(h, norm)
        ctx.save_for_backward(h, statistics, norm_weight, norm_bias, weight)
        ctx.groups = groups
        cast_weight, cast_bias = cast_together((weight, bias), dtype)
        convolve = partial(F.conv2d, weight=cast_weight, bias=cast_bias, padding=weight.shape[2] // 2)
        return convolve_end(convolve, activated, h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, statistics, norm_weight, norm_bias, weight = ctx.saved_tensors
        norm, cast = Norm(norm_weight, norm_bias, ctx.groups, eps=0.0), weight.to(h.dtype)
        grad, *grads = activated_conv_backward(grad_out, None, h, statistics, norm, cast)
        grad_h, *of_norm, _ = normalize_backward(grad, h, statistics, norm, in_place=True)
        return grad_h, *of_norm, *cast_parameter_gradients(grads, weight), None, None, None
