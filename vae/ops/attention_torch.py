"""The steps between the matrix products of attention, from PyTorch operations.

Scores and their gradients are (images, queries, keys) in fp32 or fp64; the keys are all of an image.
`weights` and `grad_scores` are in the dtype of the products, and may use the same memory as the scores and
`grad_weights`.
"""

import torch
from torch import Tensor


def softmax_step(scores: Tensor, weights: Tensor, log_sums: Tensor, sums: Tensor) -> None:
    """weights = exp(scores - their maximum), sums (images, queries) of them, log_sums = logsumexp(scores).

    `scores` is overwritten.
    """
    maxima = scores.amax(-1)
    torch.sum(scores.sub_(maxima[..., None]).exp_(), dim=-1, out=sums)
    torch.add(maxima, sums.log(), out=log_sums)
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
