"""The steps of vae.ops.attention as Triton kernels.

A program processes whole rows of scores, several columns at a time. Sums and maxima of a row are kept per
column of a tile, and reduced once. Only the softmax reads its block twice. All three kernels are bound by
memory bandwidth. Arithmetic is fp32. Their speed is not measured yet.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

# Triton reads the annotations of kernels: only `constexpr` parameters have one.
# mypy: disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are uppercase, as in Triton's own kernels

import triton
import triton.language as tl
from torch import Tensor

from vae.ops import library
from vae.ops.library import launch

STAGES = tl.constexpr(3)  # two tiles of each matrix in flight: 32 KiB for two matrices
LOWEST = tl.constexpr(-3.4e38)  # finite, so that differences are numbers


@triton.jit
def _rows(rows, ROWS: tl.constexpr):
    """This program's rows, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < rows


@triton.jit
def _tile(row, rows, stride, start, COLUMNS: tl.constexpr):
    """Offsets of some columns of these rows, padding at their end included, and which elements exist."""
    column = start + tl.arange(0, COLUMNS)
    return row[:, None] * stride + column[None, :], (row < rows)[:, None] & (column < stride)[None, :]


@triton.jit
def softmax_kernel(
    scores, weights, log_sums, sums, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, exists = _rows(rows, ROWS)
    maxima, partial = tl.full([ROWS, COLUMNS], LOWEST, tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        offsets, inside = _tile(row, rows, stride, start, COLUMNS)
        has = (start + tl.arange(0, COLUMNS) < columns)[None, :]
        s = tl.where(has, tl.load(scores + offsets, mask=inside, other=0.0), -float("inf"))
        larger = tl.maximum(maxima, s)
        partial = partial * tl.exp(maxima - larger) + tl.exp(s - larger)
        maxima = larger
    maximum = tl.max(maxima, 1)
    total = tl.sum(partial * tl.exp(maxima - maximum[:, None]), 1)
    tl.store(sums + row, total, mask=exists)
    tl.store(log_sums + row, maximum + tl.log(total), mask=exists)
    for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        offsets, inside = _tile(row, rows, stride, start, COLUMNS)
        w = tl.exp(tl.load(scores + offsets, mask=inside, other=0.0) - maximum[:, None])
        tl.store(weights + offsets, w.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    scores,
    grad_weights,
    weights,
    grad_scores,
    log_sums,
    deltas,
    scale,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, exists = _rows(rows, ROWS)
    log_sum = tl.load(log_sums + row, mask=exists, other=0.0)
    delta = tl.load(deltas + row, mask=exists, other=0.0)
    for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        offsets, inside = _tile(row, rows, stride, start, COLUMNS)
        w = tl.exp(tl.load(scores + offsets, mask=inside, other=0.0) - log_sum[:, None])
        grad = tl.load(grad_weights + offsets, mask=inside, other=0.0)
        grad = w * (grad - delta[:, None]) * scale
        tl.store(weights + offsets, w.to(weights.dtype.element_ty), mask=inside)
        tl.store(grad_scores + offsets, grad.to(grad_scores.dtype.element_ty), mask=inside)


@triton.jit
def row_products_kernel(a, b, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, exists = _rows(rows, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        offsets, inside = _tile(row, rows, stride, start, COLUMNS)
        left = tl.load(a + offsets, mask=inside, other=0.0).to(tl.float32)
        total += left * tl.load(b + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 1), mask=exists)


def softmax_step(scores: Tensor, weights: Tensor, log_sums: Tensor, sums: Tensor) -> None:
    """vae.ops.attention.softmax_step; rows of scores and weights may be padded."""
    _launch(softmax_kernel, (scores, weights, log_sums, sums), scores.stride(1))


def gradient_step(
    scores: Tensor,
    grad_weights: Tensor,
    weights: Tensor,
    grad_scores: Tensor,
    log_sums: Tensor,
    deltas: Tensor,
    scale: float,
) -> None:
    """vae.ops.attention.gradient_step; rows of the first four tensors may be padded."""
    tensors = (scores, grad_weights, weights, grad_scores, log_sums, deltas)
    _launch(gradient_kernel, tensors, scores.stride(1), scale)


def row_products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """vae.ops.attention.row_products; `out` is dense."""
    # not a.stride(1): of one token, a contiguous tensor may have any
    _launch(row_products_kernel, (a.contiguous(), b.contiguous(), out), a.shape[2])


def _launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], stride: int, *scale: float) -> None:
    """Run a kernel over the rows of the first tensor (images, queries, columns), `stride` elements apart."""
    images, queries, columns = tensors[0].shape
    rows = images * queries
    tile = library.row_tile(min(columns, library.ROW_TILE_ELEMENTS))
    numbers = (*scale, rows, columns, stride, tile.rows, tile.columns)
    launch(kernel, (-(-rows // tile.rows), 1, 1), tile.num_warps, tensors, numbers)
