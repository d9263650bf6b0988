"""One-head attention without the N x N score matrix: some queries at a time, with all keys.

Forward saves the logarithm of each query's sum of exp(score). Backward computes the scores again and needs no
reduction over keys (Dao et al., 2022, appendix B). PyTorch computes the matrix products with the vendor's
library. The step between them is one Triton kernel if Triton is available.
"""

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vae.ops.library import accumulation_dtype, has_no_data, kernel_module, once_differentiable, uses_triton

# Queries at a time on a GPU, for each channel. With 4096 queries of 512 channels, a product with a result as
# wide as the channels has 128 tiles of 128 x 128, about one wave on the 132 SMs of an H200. The scratch of
# backward is then as large as three feature maps of the first resolution, and never part of the peak of a
# step of 128 to 4096 px. The speed is not measured yet.
QUERIES_PER_CHANNEL = 8
# Without gradients, memory is what limits an image: this scratch is as large as six feature maps.
INFERENCE_QUERIES_PER_CHANNEL = 2
MAX_SCORES = 2**29  # a quarter of what 32-bit integers count: 6 GiB of scratch in backward
ROW_MULTIPLE = 16  # rows of scores start at multiples of 16 elements: 1000 px have 15,625 tokens
CPU_SCORES = 2**20  # 4 MiB in fp32: a share of a third-level cache
CPU_QUERIES = 512  # at least; with 256, bf16 takes a quarter more time at 4096 tokens


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(C)) v over tokens, q k v (B, N, C), with the whole score matrix in memory."""
    scores = torch.bmm(q, k.mT) * _scale(q)
    return scores.softmax(dim=-1, dtype=accumulation_dtype(q)).to(q.dtype) @ v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention_reference with memory linear in N; softmax in fp32 (fp64 for fp64 inputs)."""
    return _Attention.apply(q, k, v, torch.is_grad_enabled())


def attention_blocks(
    batch: int, tokens: int, channels: int, device_type: str, has_gradient: bool = True
) -> tuple[int, int]:
    """Images and queries at a time; several images only with all of their queries."""
    if device_type == "cpu":
        queries = max(CPU_QUERIES, CPU_SCORES // tokens)
    else:
        per_channel = QUERIES_PER_CHANNEL if has_gradient else INFERENCE_QUERIES_PER_CHANNEL
        queries = max(1, min(per_channel * channels, MAX_SCORES // tokens))
    return max(1, min(batch, queries // tokens)), min(tokens, queries)


def backend(q: Tensor) -> ModuleType | None:
    """The module with the steps between products: Triton kernels on a GPU if possible, else this one.

    None for tensors without data: the steps allocate nothing.
    """
    if has_no_data(q):
        return None
    return kernel_module("vae.ops.attention_triton" if uses_triton("attention", q) else __name__)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, has_gradient: bool) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # of each query, the logarithm of the sum of exp(score)
        log_sums = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q))
        at_once, most = blocks = attention_blocks(*_sizes(q), q.device.type, has_gradient)
        # Weights are at most 1 and divided by their sum after the product: bf16 is finest just below 1.
        totals = torch.empty_like(out[:at_once, :most], dtype=log_sums.dtype)
        sums = torch.empty_like(log_sums[:at_once, :most])
        steps, scale = backend(q), _scale(q)
        for (s, w), (keys, values), rows, _ in _blocks(q, blocks, 1, (k, v), (q, out, log_sums)):
            queries, block, block_log_sums = rows
            total, row_sums = (buffer[: len(block), : block.shape[1]] for buffer in (totals, sums))
            _product(s, queries, keys.mT, alpha=scale)
            if steps is not None:
                steps.softmax_step(s, w, block_log_sums, row_sums)
            _product(total, w, values)
            torch.div(total, row_sums[..., None], out=block)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # fp32 (or fp64): gradients of k and v are sums over the blocks of queries
        grad_k, grad_v = (torch.empty_like(grad_q, dtype=accumulation_dtype(q)) for _ in range(2))
        _write_gradients(grad_out, (q, k, v, out, log_sums), grad_q, grad_k, grad_v)
        return grad_q, grad_k.to(q.dtype), grad_v.to(q.dtype), None


def _write_gradients(
    grad_out: Tensor, saved: Sequence[Tensor], grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
) -> None:
    q, k, v, out, log_sums = saved
    deltas = torch.empty_like(log_sums)  # sums of grad_out * out: D of Dao et al.
    steps, blocks, scale = backend(q), attention_blocks(*_sizes(q), q.device.type), _scale(q)
    if steps is not None:
        steps.row_products(grad_out, out, deltas)
    by_image, by_query = (k, v, grad_k, grad_v), (q, grad_q, grad_out, log_sums, deltas)
    for (s, w, dw, ds), images, rows, more in _blocks(q, blocks, 2, by_image, by_query):
        (keys, values, grad_keys, grad_values), (queries, grad_queries, grad, *of_rows) = images, rows
        _product(s, queries, keys.mT, alpha=scale)
        _product(dw, grad, values.mT)
        if steps is not None:
            steps.gradient_step(s, dw, w, ds, *of_rows, scale)
        _product(grad_values, w.mT, grad, accumulate=more)
        _product(grad_keys, ds.mT, queries, accumulate=more)
        _product(grad_queries, ds, keys)


Parts = tuple[Tensor, ...]


def _blocks(
    q: Tensor, blocks: tuple[int, int], buffers: int, by_image: Parts, by_query: Parts
) -> Iterator[tuple[list[Tensor], Parts, Parts, bool]]:
    """Yield for each block: scratch for its scores, its parts of the tensors, and whether others precede it.

    Tensors `by_image` are (B, ...), and `by_query` (B, N, ...). The scratch is `buffers` pairs. A pair is a
    buffer in fp32 (or fp64) and one in q's dtype, or one buffer if the dtypes are equal. Rows are padded to
    multiples of ROW_MULTIPLE, without which kernels and matrix products load one element at a time.
    """
    tokens, (at_once, most) = q.shape[1], blocks
    padded = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    scratch = []
    for _ in range(buffers):
        scores = q.new_empty(at_once * most * padded, dtype=accumulation_dtype(q))
        scratch += [scores, scores if scores.dtype == q.dtype else torch.empty_like(scores, dtype=q.dtype)]
    shape: tuple[int, ...] = ()
    for images, rows in zip(_splits(by_image, at_once, 0), _splits(by_query, at_once, 0), strict=True):
        for index, parts in enumerate(_splits(rows, most, 1)):
            if shape != (needed := (*parts[0].shape[:2], padded)):  # less in the last block
                shape = needed
                views = [buffer[: math.prod(needed)].view(needed)[..., :tokens] for buffer in scratch]
            yield views, images, parts, index > 0


def _splits(tensors: Parts, size: int, dim: int) -> Iterator[Parts]:
    """The parts of all tensors together."""
    return zip(*(tensor.split(size, dim) for tensor in tensors), strict=True)


def _product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, accumulate: bool = False) -> None:
    """out = alpha * a @ b for each image, added to `out` if `accumulate`; out may have a wider dtype."""
    if has_no_data(a):  # PyTorch has no rule for out_dtype; the FLOPs are the same
        torch.bmm(a, b, out=out.view(a.dtype)[..., : out.shape[2]])
    elif a.dtype == out.dtype:
        out.baddbmm_(a, b, beta=int(accumulate), alpha=alpha)
    elif a.device.type == "cuda":  # sums and result are fp32, without a rounding in between
        torch.baddbmm(out, a, b, out_dtype=out.dtype, beta=int(accumulate), alpha=alpha, out=out)
    elif accumulate:
        out.add_(torch.bmm(a, b), alpha=alpha)
    else:
        torch.mul(torch.bmm(a, b), alpha, out=out)


def _sizes(q: Tensor) -> tuple[int, int, int]:
    batch, tokens, channels = q.shape
    return batch, tokens, channels


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


# ---- The steps between the products ---------------------------------------------------------------------
# Scores and their gradients are (images, queries, keys) in fp32 or fp64; the keys are all of an image.
# `weights` and `grad_scores` are in the dtype of the products, and may use the same memory as the scores and
# `grad_weights`.


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
