"""Gradients of convolutions with respect to the input, the weight and the bias."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vae.ops.library import cast_together

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
