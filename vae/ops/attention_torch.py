"""The steps between the matrix products of blocked attention, from PyTorch operations.

Scores and their gradients are (images, queries, keys) in fp32 or fp64. `weights` and `grad_scores` are in the
dtype of the products, and may use the same memory as the scores and `grad_weights`.
"""

import torch
from torch import Tensor


def softmax_step(scores: Tensor, weights: Tensor, row_max: Tensor, row_sum: Tensor, rescale: Tensor) -> None:
    """Raise `row_max` (images, queries) to this block's maximum; weights = exp(scores - row_max).

    `row_sum` becomes the sum of all weights so far. `rescale` becomes the factor for results of earlier
    blocks. `scores` is overwritten.
    """
    new_max = torch.maximum(row_max, scores.amax(-1))
    torch.sub(row_max, new_max, out=rescale).exp_()
    row_max.copy_(new_max)
    scores.sub_(new_max[..., None]).exp_()
    row_sum.mul_(rescale).add_(scores.sum(-1))
    if weights.data_ptr() != scores.data_ptr():
        weights.copy_(scores)


def gradient_step(
    scores: Tensor,
    grad_weights: Tensor,
    weights: Tensor,
    grad_scores: Tensor,
    log_sums: Tensor,
    deltas: Tensor,
    scale: float,
) -> None:
    """weights = exp(scores - log_sums), grad_scores = weights * (grad_weights - deltas) * scale.

    `scores` and `grad_weights` are overwritten.
    """
    scores.sub_(log_sums[..., None]).exp_()
    grad_weights.sub_(deltas[..., None]).mul_(scores).mul_(scale)
    if weights.data_ptr() != scores.data_ptr():
        weights.copy_(scores)
        grad_scores.copy_(grad_weights)


def row_products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Sum over the last dimension of a * b, in the dtype of `out`."""
    torch.sum(a.to(out.dtype) * b.to(out.dtype), dim=-1, out=out)
