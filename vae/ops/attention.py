"""One-head attention without the N x N score matrix: in blocks of scores, recomputed in backward.

Forward keeps a running maximum and sum per query (Milakov & Gimelshein, 2018). Backward uses the logarithm of
that sum and so needs no reduction over keys (Dao et al., 2022, appendix B). PyTorch computes the matrix
products with the vendor's library. Each step between them is one Triton kernel if Triton is available.
"""

import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vae.ops import attention_torch
from vae.ops.library import accumulation_dtype, define_op, has_no_data, uses_triton

# Queries and keys of a block of scores, and so the most scores of several small images at once. With 4096 x
# 8192, a product with a result as wide as the channels (512) has at least 128 tiles of 128 x 128, about one
# wave on the 132 SMs of an H200. All scratch of backward is then 416 MiB in bf16 for any number of tokens,
# and never part of the peak of a step of 128 to 4096 px. Blocks of 2048 x 2048 would need 56 MiB and seven
# times as many launches. The speed is not measured yet.
GPU_BLOCK = (4096, 8192)
CPU_BLOCK = (1024, 1024)  # 4 MiB of scores in fp32: a share of a third-level cache


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(C)) v over tokens, q k v (B, N, C), with the whole score matrix in memory."""
    scores = torch.bmm(q, k.mT) * _scale(q)
    return scores.softmax(dim=-1, dtype=accumulation_dtype(q)).to(q.dtype) @ v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same as attention_reference, with memory linear in N; softmax in fp32 (fp64 for fp64 inputs)."""
    return _op(q, k, v)[0]


class Blocks(NamedTuple):
    """Sizes of the blocks that (B, N, N) scores are cut into."""

    images: int  # several only if their whole score matrices fit: the rows of a block are always dense
    queries: int
    keys: int


def attention_blocks(batch: int, tokens: int, device_type: str) -> Blocks:
    """The blocks on a device; the last block in each direction may be smaller."""
    queries, keys = CPU_BLOCK if device_type == "cpu" else GPU_BLOCK
    images = max(1, min(batch, queries * keys // tokens**2))
    return Blocks(images, min(tokens, queries), min(tokens, keys))


def backend(q: Tensor) -> ModuleType:
    """The module with the steps between the products: Triton kernels on a GPU if possible, else PyTorch."""
    if uses_triton("attention", q):
        return importlib.import_module("vae.ops.attention_triton")
    return attention_torch


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the sum of exp(score) for each query: (B, N)."""
    batch, tokens, channels = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sums = q.new_empty(batch, tokens, dtype=accumulation_dtype(q))
    if not q.is_meta and has_no_data(q):  # torch.compile is tracing; on meta, the scratch is counted below
        return out, log_sums
    blocks = attention_blocks(batch, tokens, q.device.type)
    scores, weights = _score_buffers(q, blocks)
    totals = q.new_empty(blocks.images * blocks.queries * channels, dtype=accumulation_dtype(q))
    rescales = q.new_empty(blocks.images * blocks.queries, dtype=accumulation_dtype(q))
    row_sums = torch.zeros_like(log_sums)
    if q.is_meta:
        return out, log_sums
    steps, row_maxima = backend(q), log_sums.fill_(-math.inf)
    for images in _slices(batch, blocks.images):
        for rows in _slices(tokens, blocks.queries):
            block = out[images, rows]
            row_max, row_sum = row_maxima[images, rows], row_sums[images, rows]
            total, rescale = _view(totals, *block.shape), _view(rescales, *row_max.shape)
            for columns in _slices(tokens, blocks.keys):
                values = v[images, columns]
                s, w = (_view(buffer, *row_max.shape, values.shape[1]) for buffer in (scores, weights))
                _product(s, q[images, rows], k[images, columns].mT, alpha=_scale(q))
                steps.softmax_step(s, w, row_max, row_sum, rescale)
                if columns.start:
                    total.mul_(rescale[..., None])
                _product(total, w, values, accumulate=columns.start > 0)
            torch.div(total, row_sum[..., None], out=block)
    return out, log_sums.add_(row_sums.log_())


def _attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Key blocks are the outer loop, so only q's needs sums for all tokens."""
    batch, tokens, channels = q.shape
    grad_k, grad_v = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    if not q.is_meta and has_no_data(q):  # torch.compile is tracing; on meta, the scratch is counted below
        return torch.empty_like(grad_k), grad_k, grad_v
    dtype = accumulation_dtype(q)
    blocks = attention_blocks(batch, tokens, q.device.type)
    scratch = [*_score_buffers(q, blocks), *_score_buffers(q, blocks)]
    # fp32 sums: summing in bf16 would lose the small contributions
    key_sums = q.new_empty(2, blocks.images * blocks.keys * channels, dtype=dtype)
    query_sums = q.new_empty(min(batch, blocks.images) * tokens * channels, dtype=dtype)
    # if all images are one block, grad_q is allocated at the end, after the scratch is freed
    grad_q = torch.empty_like(grad_k) if batch > blocks.images else None
    deltas = q.new_empty(batch, tokens, dtype=dtype)  # sums of grad_out * out: D of Dao et al.
    sums = query_sums.view(-1, tokens, channels)
    if not q.is_meta:
        backend(q).row_products(grad_out, out, deltas)
        for images in _slices(batch, blocks.images):
            sums = _view(query_sums, *q[images].shape)
            _image_gradients(
                images, grad_out, q, k, v, log_sums, deltas, scratch, key_sums, sums, grad_k, grad_v, blocks
            )
            if grad_q is not None:
                grad_q[images] = sums
    del scratch, key_sums
    return sums.to(q.dtype) if grad_q is None else grad_q, grad_k, grad_v


def _image_gradients(
    images: slice,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_sums: Tensor,
    deltas: Tensor,
    scratch: list[Tensor],
    key_sums: Tensor,
    query_sums: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    blocks: Blocks,
) -> None:
    """Gradients of one block of images: of q in fp32, written to query_sums, and of k and v."""
    steps, tokens = backend(q), q.shape[1]
    for columns in _slices(tokens, blocks.keys):
        keys, values = k[images, columns], v[images, columns]
        sum_k, sum_v = (_view(buffer, *keys.shape) for buffer in key_sums)
        for rows in _slices(tokens, blocks.queries):
            queries, grad = q[images, rows], grad_out[images, rows]
            s, w, dw, ds = (_view(t, *queries.shape[:2], keys.shape[1]) for t in scratch)
            _product(s, queries, keys.mT, alpha=_scale(q))
            _product(dw, grad, values.mT)
            steps.gradient_step(s, dw, w, ds, log_sums[images, rows], deltas[images, rows], _scale(q))
            _product(sum_v, w.mT, grad, accumulate=rows.start > 0)
            _product(sum_k, ds.mT, queries, accumulate=rows.start > 0)
            _product(query_sums[:, rows], ds, keys, accumulate=columns.start > 0)
        grad_k[images, columns], grad_v[images, columns] = sum_k, sum_v


def _product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, accumulate: bool = False) -> None:
    """out = alpha * a @ b for each image, added to `out` if `accumulate`; out has the softmax's dtype."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b, beta=int(accumulate), alpha=alpha)
    elif a.device.type == "cuda":  # sums and result are fp32, without a rounding in between
        torch.baddbmm(out, a, b, out_dtype=out.dtype, beta=int(accumulate), alpha=alpha, out=out)
    elif accumulate:
        out.add_(torch.bmm(a, b), alpha=alpha)
    else:
        torch.mul(torch.bmm(a, b), alpha, out=out)


def _score_buffers(q: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Buffers for a block of scores and for the weights in q's dtype; one buffer if the dtypes are equal."""
    scores = q.new_empty(math.prod(blocks), dtype=accumulation_dtype(q))
    return scores, scores if scores.dtype == q.dtype else q.new_empty(math.prod(blocks))


def _view(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad_out: Tensor, grad_log_sums: Tensor) -> tuple[Tensor, ...]:
    return _backward_op(grad_out, *ctx.saved_tensors)


def _flops(q: torch.Size, *_: object, **__: object) -> int:
    batch, tokens, channels = q
    return 2 * 2 * batch * tokens**2 * channels  # two products


def _backward_flops(grad_out: torch.Size, *_: object, **__: object) -> int:
    batch, tokens, channels = grad_out
    return 5 * 2 * batch * tokens**2 * channels  # the scores again, and four gradients


_backward_op = define_op(_attention_backward, _attention_backward, flops=_backward_flops)
_op = define_op(_attention, _attention, _gradients, _save_for_backward, flops=_flops)
