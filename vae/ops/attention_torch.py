"""What lies between the matrix products of blocked attention, in stock PyTorch operations.

Scores and their gradients are (images, queries, keys) in fp32 or fp64; `weights` and `grad_scores` are in
the dtype of the products, and may be the very memory of the scores and of `grad_weights`.
"""

import torch


def softmax_step(
    scores: torch.Tensor, weights: torch.Tensor, peak: torch.Tensor, mass: torch.Tensor, shrink: torch.Tensor
) -> None:
    """weights = exp(scores - peak), where `peak` (images, queries) is first raised to this block's maximum.

    `mass` becomes the sum of all weights so far; `shrink` says by what earlier blocks' results are to be
    multiplied. `scores` is overwritten.
    """
    highest = torch.maximum(peak, scores.amax(-1))
    torch.sub(peak, highest, out=shrink).exp_()
    peak.copy_(highest)
    scores.sub_(highest[..., None]).exp_()
    mass.mul_(shrink).add_(scores.sum(-1))
    if weights.data_ptr() != scores.data_ptr():
        weights.copy_(scores)


def gradient_step(
    scores: torch.Tensor,
    grad_weights: torch.Tensor,
    weights: torch.Tensor,
    grad_scores: torch.Tensor,
    log_sums: torch.Tensor,
    deltas: torch.Tensor,
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


def row_products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Sum over the last dimension of a * b, in the dtype of `out`."""
    torch.sum(a.to(out.dtype) * b.to(out.dtype), dim=-1, out=out)
