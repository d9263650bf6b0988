"""One-head attention that never holds the N x N score matrix: blocks of scores, redone in backward.

Forward keeps a running maximum and sum per query (Milakov & Gimelshein, 2018), backward has the logarithm
of that sum and so needs no reduction over keys (Dao et al., 2022, appendix B). Products are PyTorch's, so
they are as fast as the vendor's; the steps between them are one Triton kernel each on a GPU that has it.
"""

import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from vae.ops import attention_torch as attention_torch
from vae.ops.layout import accumulation_dtype
from vae.ops.library import define_op, has_no_data, triton_is_installed

# Sides of a block of scores. At 2048 x 2048 the products of a block whose result is as wide as the channels
# (512) are 64 tiles of 128 x 128 or 128 of 128 x 64, about one wave on the 132 SMs of an H200; those behind
# scores are 256 tiles. All scratch of backward is then 56 MiB at any number of tokens, and the fp32 scores,
# 16 MiB each, stay within the second-level cache of an H200 (50 MB) or an RTX 5090 (96 MB). 2048 x 1024 would
# save 28 MiB more and leave the gradients of keys 32 tiles. Not measured yet.
GPU_BLOCK = (2048, 2048)
BATCHED_SCORES = 2**20  # images are taken together up to here, so that small ones are no string of launches
CPU_BLOCK = (1024, 1024)  # 4 MiB of scores in fp32: a share of a third-level cache


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(C)) v over tokens, q k v (B, N, C), with the whole score matrix in memory."""
    scores = torch.bmm(q, k.mT) * _scale(q)
    return scores.softmax(dim=-1, dtype=accumulation_dtype(q)).to(q.dtype) @ v


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """attention_reference with memory linear in N; the softmax is in fp32 (fp64 for fp64 inputs)."""
    return _op(q, k, v)[0]


class Blocks(NamedTuple):
    """How (B, N, N) scores are cut."""

    images: int  # taken at once, where their whole score matrices are small
    queries: int
    keys: int


def attention_blocks(batch: int, tokens: int, device_type: str) -> Blocks:
    """The blocks on a device; the last of each direction may be smaller."""
    most_queries, most_keys = CPU_BLOCK if device_type == "cpu" else GPU_BLOCK
    queries, keys = min(tokens, most_queries), min(tokens, most_keys)
    return Blocks(max(1, min(batch, BATCHED_SCORES // (queries * keys))), queries, keys)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and for each query the logarithm of the sum of exp(score): (B, N)."""
    batch, tokens, channels = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sums = q.new_empty(batch, tokens, dtype=accumulation_dtype(q))
    if not q.is_meta and has_no_data(q):
        return out, log_sums
    blocks = attention_blocks(batch, tokens, q.device.type)
    scores, weights = _score_scratch(q, blocks)
    gathered = q.new_empty(blocks.images * blocks.queries * channels, dtype=accumulation_dtype(q))
    running = q.new_empty(3, blocks.images * blocks.queries, dtype=accumulation_dtype(q))
    if q.is_meta:
        return out, log_sums
    steps = _steps(q)
    for some in _slices(batch, blocks.images):
        for rows in _slices(tokens, blocks.queries):
            shape = out[some, rows].shape
            total = _part(gathered, *shape)
            peak, mass, shrink = (_part(values, *shape[:2]) for values in running)
            peak.fill_(-math.inf)
            mass.zero_()
            for columns in _slices(tokens, blocks.keys):
                values = v[some, columns]
                s, w = (_part(scratch, *shape[:2], values.shape[1]) for scratch in (scores, weights))
                _product(s, q[some, rows], k[some, columns].mT, alpha=_scale(q))
                steps.softmax_step(s, w, peak, mass, shrink)
                if columns.start:
                    total.mul_(shrink[..., None])
                _product(total, w, values, add=columns.start > 0)
            out[some, rows] = total.div_(mass[..., None])
            log_sums[some, rows] = peak + mass.log()
    return out, log_sums


def _attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. Key blocks are the outer loop: only q's gradient is summed over blocks."""
    batch, tokens, channels = q.shape
    grads = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2)]  # of k and v
    if not q.is_meta and has_no_data(q):
        return torch.empty_like(grads[0]), *grads
    wide = accumulation_dtype(q)
    blocks = attention_blocks(batch, tokens, q.device.type)
    scratch = [*_score_scratch(q, blocks), *_score_scratch(q, blocks)]
    # fp32 sums: added up in bf16 the small contributions would be lost
    key_sums = q.new_empty(2, blocks.images * blocks.keys * channels, dtype=wide)
    query_sums = q.new_empty(min(batch, blocks.images) * tokens * channels, dtype=wide)
    # of several rounds; that of one is made where the scratch has gone
    grad_q = torch.empty_like(grads[0]) if batch > blocks.images else None
    deltas = q.new_empty(batch, tokens, dtype=wide)
    if q.is_meta:
        del scratch, key_sums
        return query_sums.view(-1, tokens, channels).to(q.dtype) if grad_q is None else grad_q, *grads
    steps = _steps(q)
    steps.row_products(grad_out, out, deltas)
    for some in _slices(batch, blocks.images):
        sums = _part(query_sums, *q[some].shape)
        for columns in _slices(tokens, blocks.keys):
            keys, values = k[some, columns], v[some, columns]
            grad_k, grad_v = (_part(room, *keys.shape) for room in key_sums)
            for rows in _slices(tokens, blocks.queries):
                queries, grad = q[some, rows], grad_out[some, rows]
                shape = (*queries.shape[:2], keys.shape[1])
                s, w, dw, ds = (_part(t, *shape) for t in scratch)
                _product(s, queries, keys.mT, alpha=_scale(q))
                _product(dw, grad, values.mT)
                steps.gradient_step(s, dw, w, ds, log_sums[some, rows], deltas[some, rows], _scale(q))
                _product(grad_v, w.mT, grad, add=rows.start > 0)
                _product(grad_k, ds.mT, queries, add=rows.start > 0)
                _product(sums[:, rows], ds, keys, add=columns.start > 0)
            grads[0][some, columns], grads[1][some, columns] = grad_k, grad_v
        if grad_q is not None:
            grad_q[some] = sums
    del scratch, s, w, dw, ds, key_sums, grad_k, grad_v  # before the last allocation
    return sums.to(q.dtype) if grad_q is None else grad_q, *grads


def _product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, add: bool = False
) -> None:
    """out = alpha * a @ b for each image, on top of `out` where `add`; out is as wide as the softmax."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b, beta=int(add), alpha=alpha)
    elif a.device.type == "cuda":  # summed and kept in fp32, without a rounding between
        torch.baddbmm(out, a, b, out_dtype=out.dtype, beta=int(add), alpha=alpha, out=out)
    elif add:
        out.add_(torch.bmm(a, b), alpha=alpha)
    else:
        torch.mul(torch.bmm(a, b), alpha, out=out)


def _steps(q: torch.Tensor) -> ModuleType:
    """The module with the steps between the products: Triton kernels where they apply."""
    if q.device.type == "cuda" and q.dtype != torch.float64 and triton_is_installed():
        return importlib.import_module("vae.ops.attention_triton")
    return attention_torch


def _score_scratch(q: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a block of scores, and for what is made of them in q's dtype: the same where that is wide."""
    wide = q.new_empty(math.prod(blocks), dtype=accumulation_dtype(q))
    return wide, wide if wide.dtype == q.dtype else q.new_empty(math.prod(blocks))


def _part(scratch: torch.Tensor, *shape: int) -> torch.Tensor:
    return scratch[: math.prod(shape)].view(shape)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _scale(q: torch.Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx, grad_out, grad_log_sums):
    return _backward_op(grad_out, *ctx.saved_tensors)


def _flops(q_shape, *_, **__):
    batch, tokens, channels = q_shape
    return 2 * 2 * batch * tokens**2 * channels  # two products


def _backward_flops(grad_shape, *_, **__):
    batch, tokens, channels = grad_shape
    return 5 * 2 * batch * tokens**2 * channels  # the scores again, and four gradients


_backward_op = define_op(_attention_backward, _attention_backward, flops=_backward_flops)
_op = define_op(_attention, _attention, _gradients, _save_for_backward, flops=_flops)
