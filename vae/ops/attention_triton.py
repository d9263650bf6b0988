"""The steps of vae.ops.attention_torch as Triton kernels: each reads its block once and writes it once.

A program processes whole rows of a block, so the maximum and sum of a row need no second pass. All three
kernels are bound by memory bandwidth. Arithmetic is fp32. Their speed is not measured yet.

Import this module only if Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

# Triton reads the annotations of kernels: only `constexpr` parameters have one.
# mypy: disallow-incomplete-defs=False
# ruff: noqa: N803 - constexpr parameters are uppercase, as in Triton's own kernels

import torch
import triton
import triton.language as tl
from torch import Tensor

from vae.ops.gpu_blocks import row_tile
from vae.ops.library import launch


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows, their offsets in a dense matrix, and which elements and rows exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, row[:, None] * columns + column[None, :], inside, row < rows


@triton.jit
def softmax_kernel(
    scores,
    weights,
    row_max,
    row_sum,
    rescale,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, offsets, inside, exists = _tile(rows, columns, ROWS, COLUMNS)
    s = tl.load(scores + offsets, mask=inside, other=-float("inf"))
    old_max = tl.load(row_max + row, mask=exists, other=0.0)
    new_max = tl.maximum(old_max, tl.max(s, 1))
    w = tl.where(inside, tl.exp(s - new_max[:, None]), 0.0)
    factor = tl.exp(old_max - new_max)
    tl.store(weights + offsets, w.to(weights.dtype.element_ty), mask=inside)
    tl.store(
        row_sum + row, tl.load(row_sum + row, mask=exists, other=0.0) * factor + tl.sum(w, 1), mask=exists
    )
    tl.store(row_max + row, new_max, mask=exists)
    tl.store(rescale + row, factor, mask=exists)


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, offsets, inside, exists = _tile(rows, columns, ROWS, COLUMNS)
    log_sum = tl.load(log_sums + row, mask=exists, other=0.0)
    delta = tl.load(deltas + row, mask=exists, other=0.0)
    s = tl.load(scores + offsets, mask=inside, other=-float("inf"))
    grad = tl.load(grad_weights + offsets, mask=inside, other=0.0)
    w = tl.exp(s - log_sum[:, None])
    grad = w * (grad - delta[:, None]) * scale
    tl.store(weights + offsets, w.to(weights.dtype.element_ty), mask=inside)
    tl.store(grad_scores + offsets, grad.to(grad_scores.dtype.element_ty), mask=inside)


@triton.jit
def row_products_kernel(a, b, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, offsets, inside, exists = _tile(rows, columns, ROWS, COLUMNS)
    left = tl.load(a + offsets, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(left * right, 1), mask=exists)


def softmax_step(scores: Tensor, weights: Tensor, row_max: Tensor, row_sum: Tensor, rescale: Tensor) -> None:
    """vae.ops.attention_torch.softmax_step; every tensor is dense."""
    _launch(softmax_kernel, scores.shape, scores, weights, row_max, row_sum, rescale)


def gradient_step(
    scores: Tensor,
    grad_weights: Tensor,
    weights: Tensor,
    grad_scores: Tensor,
    log_sums: Tensor,
    deltas: Tensor,
    scale: float,
) -> None:
    """vae.ops.attention_torch.gradient_step; every tensor is dense."""
    tensors = (scores, grad_weights, weights, grad_scores, log_sums, deltas)
    _launch(gradient_kernel, scores.shape, *tensors, scale)


def row_products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """vae.ops.attention_torch.row_products; `out` is dense."""
    _launch(row_products_kernel, a.shape, a.contiguous(), b.contiguous(), out)


def _launch(kernel: triton.JITFunction, shape: torch.Size, first: Tensor, *others: Tensor | float) -> None:
    """Run a kernel over the rows of dense tensors of this shape."""
    rows, columns = shape[0] * shape[1], shape[2]
    tile = row_tile(columns)
    numbers = (rows, columns, tile.rows, tile.columns)
    launch(kernel, (triton.cdiv(rows, tile.rows),), tile.num_warps, first, *others, *numbers)
