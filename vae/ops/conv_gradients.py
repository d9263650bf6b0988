"""Gradients of convolutions with respect to the input, the weight and the bias, whole or in bands of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vae.ops.bands import Activation, add_to, bands, parameter_sums, write
from vae.ops.library import cast_together, empty_in_layout_of

# Output masks of conv_backward: the gradients of input, weight and bias that are wanted.
INPUT, WEIGHT, PARAMETERS = (True, False, False), (False, True, False), (False, True, True)
ALL = (True, True, True)


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
    dilation, output_padding, groups = [1, 1], [0, 0], 1
    rest = ([stride, stride], list(padding), dilation, transposed, output_padding, groups, list(output_mask))
    grads = torch.ops.aten.convolution_backward(grad_out, h, weight, [grad_out.shape[1]], *rest)
    return tuple(grad for grad in grads if grad is not None)


def cast_parameter_gradients(grads: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias in the weight's dtype; the weight's in its layout, as compilers expect."""
    grad_weight, grad_bias = cast_together(grads, weight.dtype, like=(weight, grads[1]))
    return grad_weight, grad_bias


def same_conv_input_gradient(
    grad_out: Tensor, like: Tensor, weight: Tensor, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Gradient with respect to the input of a stride-1 convolution with "same" padding.

    Written to `out`, or with `accumulate` added to it. `like` has the input's shape. Bands are written in the
    order of their rows. A band is written only after the rows of grad_out up to its last row are read.
    """
    parts = bands(like.shape[0], like.shape[2], grad_out.shape, like.shape)
    size, padding = weight.shape[2], weight.shape[2] // 2
    # matrix products of strided bf16: a whole step of 4 images of 128 px took 6.5 s instead of 1.2 with them
    slow = like.device.type == "cpu" and like.element_size() < 4
    if not parts and out is not None and accumulate and not slow:
        assert size == 1  # then a matrix product can add, without a temporary tensor
        matrix = weight.to(like.dtype).flatten(1).mT.expand(len(out), -1, -1)  # (B, C, C')
        total = out.view(*out.shape[:2], -1)
        torch.baddbmm(total, matrix, grad_out.flatten(2), out=total)
        return out
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
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    activation: Activation | None = None,
    wanted: tuple[bool, bool, bool] = PARAMETERS,
) -> tuple[Tensor, ...]:
    """Gradients of weight and bias of a stride-1 convolution of activation(h) with "same" padding.

    `wanted`: PARAMETERS or WEIGHT. They have h's dtype; gradients of bands are summed in at least fp32.
    """
    parts, padding = bands(h.shape[0], h.shape[2], grad_out.shape, h.shape), weight.shape[2] // 2
    # gives shape and layout; its values are not read
    like = weight if weight.dtype == h.dtype else torch.empty_like(weight, dtype=h.dtype)
    if not parts:
        part = h if activation is None else activation(h, slice(None))
        return conv_backward(grad_out, part, like, 1, (padding, padding), wanted)
    sums = parameter_sums(weight)[: sum(wanted)]
    for band in parts:
        part = band.of(h, padding, padding, activation=activation)
        add_to(sums, conv_backward(band.of(grad_out), part, like, 1, (0, padding), wanted))
    return sums
