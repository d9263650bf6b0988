"""Convolutions as operations that store no cast copy of their weights, some with norm and SiLU.

With norm and SiLU, the graph stores only the input and the statistics. Backward recomputes the activation
between norm and convolution, which is as large as the input: this costs bandwidth but no convolution. Weights
are cast to the input's dtype within the operation.

norm_silu_conv is the end of encoder and decoder. The constants that its inputs and weights may have cancel in
its result, and half precision would round both (benchmarks/LOG.md): it computes forward in `end_dtype`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.library import cast_together, empty_in_layout_of, has_no_data, layout_of, once_differentiable
from vae.ops.norm import Norm, normalize, normalize_backward, normalize_with_statistics, rms_norm_reference

# Output masks of conv_backward: the gradients of input, weight and bias that are wanted.
INPUT, WEIGHT, PARAMETERS = (True, False, False), (False, True, False), (False, True, True)
ALL = (True, True, True)


def conv_backward(
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    output_mask: tuple[bool, bool, bool],
    stride: int = 1,
    padding: int | None = None,
    transposed: bool = False,
) -> list[Tensor]:
    """PyTorch's backward of a convolution: the gradients of h, weight and bias that `output_mask` selects.

    The default is a convolution with "same" padding. Of h and of weight, only shape, layout and dtype matter
    if the other one's gradient is not selected.
    """
    rest = [stride, stride], [weight.shape[2] // 2 if padding is None else padding] * 2, [1, 1]
    bias_sizes, output_padding, groups = [grad_out.shape[1]], [0, 0], 1
    grads = torch.ops.aten.convolution_backward.default(
        grad_out, h, weight, bias_sizes, *rest, transposed, output_padding, groups, list(output_mask)
    )
    return [grad for grad in grads if grad is not None]


def cast_parameter_gradients(grads: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias in the weight's dtype, and the weight's in its layout."""
    grad_weight, grad_bias = cast_together(grads, weight.dtype, like=(weight, grads[1]))
    return grad_weight, grad_bias


def add_pointwise_input_gradient(grad_h: Tensor, grad_out: Tensor, weight: Tensor) -> Tensor:
    """Add to grad_h the gradient with respect to the input of a convolution with a 1x1 weight."""
    # matrix products of strided bf16: a whole step of 4 images of 128 px took 6.5 s instead of 1.2 with them
    if grad_h.device.type == "cpu" and grad_h.element_size() < 4:
        return grad_h.add_(*conv_backward(grad_out, grad_h, weight, INPUT))
    matrix = weight.flatten(1).mT.expand(len(grad_h), -1, -1)  # (B, C, C')
    total = grad_h.view(*grad_h.shape[:2], -1)  # a matrix product can add, without a temporary tensor
    torch.baddbmm(total, matrix, grad_out.flatten(2), out=total)
    return grad_h


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
    """Compute norm_silu_conv_reference, with a forward in `end_dtype` before the result is rounded.

    It saves only h and the statistics (B, groups) for backward, which computes in h's dtype.
    """
    return _NormSiLUConv.apply(h, norm_weight, norm_bias, weight, bias, groups, eps, end_dtype(h))


def end_dtype(h: Tensor) -> torch.dtype:
    """The dtype of norm_silu_conv: after half precision fp32, or fp16 with gradients; else that of h.

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


# ---- Changes of resolution -------------------------------------------------------------------------------


def downsample_conv_reference(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """3x3 convolution of stride 2 over h (B, C, H, W) padded right and below: (B, C', H/2, W/2)."""
    return F.conv2d(F.pad(h, (0, 1, 0, 1)), weight.to(h.dtype), bias.to(h.dtype), stride=2)


def downsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """downsample_conv_reference without a padded copy of h, the largest tensor in it.

    The convolution is padded by 2 on every side instead. Its outputs, two pixels apart, are then those of the
    reference, with one additional row and column at the start (and one at the end for odd sides), which are
    dropped.
    """
    return _DownsampleConv.apply(h, weight, bias)


def upsample_conv_reference(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nearest upsampling by two, then a 3x3 convolution: (B, C', 2H, 2W)."""
    h = F.interpolate(h, scale_factor=2.0, mode="nearest")
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def upsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """upsample_conv_reference as one transposed convolution: 4/9 of its arithmetic, and only h is stored.

    An upsampled pixel depends on each input pixel through a sum of taps, so the 3x3 kernel folds into a 4x4
    kernel of stride 2. The fold is computed in the parameters' own dtype.
    """
    return _UpsampleConv.apply(h, weight, bias)


class _DownsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        cast_weight, cast_bias = cast_together((weight, bias), h.dtype)
        padded = F.conv2d(h, cast_weight, cast_bias, stride=2, padding=2)
        # dense, as the next norm needs it; this copy is a quarter as large as a padded copy of h
        return _wanted(padded, h.shape[2:]).clone(memory_format=layout_of(h))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        h, weight = ctx.saved_tensors
        sides = [side // 2 + 1 + side % 2 for side in h.shape[2:]]
        grad = empty_in_layout_of((*grad_out.shape[:2], *sides), h).zero_()
        _wanted(grad, h.shape[2:]).copy_(grad_out)
        grad_h, *grads = conv_backward(grad, h, weight.to(h.dtype), ALL, stride=2, padding=2)
        return grad_h, *cast_parameter_gradients(grads, weight)


def _wanted(padded: Tensor, sides: torch.Size) -> Tensor:
    """The outputs of downsample_conv among those of the convolution padded by 2; `sides` of the input."""
    return padded[:, :, 1 : 1 + sides[0] // 2, 1 : 1 + sides[1] // 2]


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return F.conv_transpose2d(h, _folded(weight, h), bias.to(h.dtype), stride=2, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        h, weight = ctx.saved_tensors
        folded = _folded(weight, h)
        grad_h, grad_folded, grad_bias = conv_backward(
            grad_out, h, folded, ALL, stride=2, padding=1, transposed=True
        )
        return grad_h, *cast_parameter_gradients((_unfolded(grad_folded, weight), grad_bias), weight)


def _folded(weight: Tensor, h: Tensor) -> Tensor:
    """The 3x3 kernels (C', C, 3, 3) folded into those of the transposed convolution (C, C', 4, 4) of h.

    Along each side, the taps (a, b, c) become (c, b + c, a + b, a).
    """
    folded = F.avg_pool2d(weight.flip(2, 3), 2, stride=1, padding=1, divisor_override=1)
    return folded.transpose(0, 1).to(h.dtype, memory_format=layout_of(h))


def _unfolded(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the 3x3 kernels from the gradient of the folded ones."""
    grad = grad.transpose(0, 1).to(weight.dtype)
    return F.avg_pool2d(grad, 2, stride=1, divisor_override=1).flip(2, 3)
