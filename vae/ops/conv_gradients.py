"""Gradients of convolutions with respect to the input, the weight and the bias, whole or in bands of rows."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vae.ops.bands import Activation, add_to, bands, parameter_sums, write
from vae.ops.library import empty_in_layout_of, layout_of

# Output masks of conv_backward: the gradients of input, weight and bias that are wanted.
INPUT, PARAMETERS, ALL = (True, False, False), (False, True, True), (True, True, True)


def conv_backward(
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    stride: int,
    padding: tuple[int, int],
    output_mask: tuple[bool, bool, bool],
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    """PyTorch's backward of a convolution: the gradients of h, weight and bias that `output_mask` selects.

    `padding`: rows and columns. Only the weight's shape matters if the gradient of h is not selected.
    """
    grads: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
        grad_out,
        h,
        weight,
        [grad_out.shape[1]],
        [stride, stride],
        list(padding),
        [1, 1],
        transposed,
        [0, 0],
        1,
        list(output_mask),
    )
    return tuple(grad for grad in grads if grad is not None)


def cast_parameter_gradients(grads: Iterable[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias in the weight's dtype; the weight's in its layout, as compilers expect."""
    grad_weight, grad_bias = grads
    return grad_weight.to(weight.dtype, memory_format=layout_of(weight)), grad_bias.to(weight.dtype)


def same_conv_input_gradient(
    grad_out: Tensor, like: Tensor, weight: Tensor, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Gradient with respect to the input of a stride-1 convolution with "same" padding.

    `like` has the input's shape. Bands are written in the order of their rows. A band is written only after
    the rows of grad_out up to its last row are read.
    """
    parts = bands(like.shape[0], like.shape[2], grad_out.shape, like.shape)
    size, padding = weight.shape[2], weight.shape[2] // 2
    if not parts:
        grad = _input_gradient(grad_out, like, weight, padding)
        return grad if out is None else write(out, grad, accumulate)
    grad = empty_in_layout_of(like.shape, like) if out is None else out
    for band in parts:
        rows = _input_gradient(band.of(grad_out, padding, padding), band.of(like), weight, size - 1)
        write(band.of(grad), rows, accumulate)
    return grad


def _input_gradient(grad_out: Tensor, like: Tensor, weight: Tensor, padding_rows: int) -> Tensor:
    padding = (padding_rows, weight.shape[3] // 2)
    (grad,) = conv_backward(grad_out, like, weight.to(like.dtype), 1, padding, INPUT)
    return grad


def same_conv_parameter_gradients(
    grad_out: Tensor, h: Tensor, weight: Tensor, activation: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias of a stride-1 convolution of activation(h) with "same" padding.

    They have the weight's dtype and layout. Gradients of bands are summed in at least fp32.
    """
    parts, padding = bands(h.shape[0], h.shape[2], grad_out.shape, h.shape), weight.shape[2] // 2
    like = torch.empty_like(weight, dtype=h.dtype)  # gives shape and layout; its values are not read
    if not parts:
        part = h if activation is None else activation(h, slice(None))
        grads = conv_backward(grad_out, part, like, 1, (padding, padding), PARAMETERS)
        return cast_parameter_gradients(grads, weight)
    sums = parameter_sums(weight)
    for band in parts:
        part = band.of(h, padding, padding, activation=activation)
        add_to(sums, conv_backward(band.of(grad_out), part, like, 1, (0, padding), PARAMETERS))
    return cast_parameter_gradients(sums, weight)
