"""PyTorch's backward of a convolution, in the few terms that ours differ in."""

from collections.abc import Sequence

import torch


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
