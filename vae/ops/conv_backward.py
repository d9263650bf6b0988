"""PyTorch's backward of a convolution, in the few terms that ours differ in."""

from collections.abc import Iterable, Sequence

import torch

from vae.ops.layout import layout_of


def conv_backward(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    padding: Sequence[int],
    wanted: Sequence[bool],
    transposed: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of h, weight and bias, those that are `wanted`; `padding` of rows and columns."""
    return torch.ops.aten.convolution_backward(
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
        list(wanted),
    )


def like_parameters(grads: Iterable[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight and bias in the weight's dtype; the weight's in its layout, as compilers expect."""
    of_weight, of_bias = grads
    return of_weight.to(weight.dtype, memory_format=layout_of(weight)), of_bias.to(weight.dtype)
