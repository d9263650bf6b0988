"""The steps of vae.ops.attention_torch as Triton kernels: each reads its block once and writes it once.

A program holds whole rows of a block, so a row's maximum and sum need no second pass; memory bounds all
three. Arithmetic is fp32. No speed was measured yet.

Import this only where Triton is installed. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

import torch
import triton
import triton.language as tl

from vae.ops.gpu_blocks import row_tile
from vae.ops.library import on_its_device


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """This program's rows, their offsets in a dense matrix, and which elements and rows exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, row[:, None] * columns + column[None, :], inside, row < rows


@triton.jit
def _softmax_kernel(
    scores,
    weights,
    peak,
    mass,
    shrink,
    rows,
    columns,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row, offsets, inside, exists = _tile(rows, columns, ROWS, COLUMNS)
    s = tl.load(scores + offsets, mask=inside, other=-float("inf"))
    before = tl.load(peak + row, mask=exists, other=0.0)
    highest = tl.maximum(before, tl.max(s, 1))
    w = tl.where(inside, tl.exp(s - highest[:, None]), 0.0)
    factor = tl.exp(before - highest)
    tl.store(weights + offsets, w.to(weights.dtype.element_ty), mask=inside)
    tl.store(mass + row, tl.load(mass + row, mask=exists, other=0.0) * factor + tl.sum(w, 1), mask=exists)
    tl.store(peak + row, highest, mask=exists)
    tl.store(shrink + row, factor, mask=exists)


@triton.jit
def _gradient_kernel(
    scores,
    grad_weights,
    weights,
    grad_scores,
    log_sums,
    deltas,
    scale,
    rows,
    columns,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
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
def _row_products_kernel(a, b, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    row, offsets, inside, exists = _tile(rows, columns, ROWS, COLUMNS)
    left = tl.load(a + offsets, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(left * right, 1), mask=exists)


@on_its_device
def softmax_step(
    scores: torch.Tensor, weights: torch.Tensor, peak: torch.Tensor, mass: torch.Tensor, shrink: torch.Tensor
) -> None:
    """What vae.ops.attention_torch.softmax_step does; every tensor is dense."""
    _launch(_softmax_kernel, scores.shape, scores, weights, peak, mass, shrink)


@on_its_device
def gradient_step(
    scores: torch.Tensor,
    grad_weights: torch.Tensor,
    weights: torch.Tensor,
    grad_scores: torch.Tensor,
    log_sums: torch.Tensor,
    deltas: torch.Tensor,
    scale: float,
) -> None:
    """What vae.ops.attention_torch.gradient_step does; the scores' tensors are dense."""
    log_sums, deltas = log_sums.contiguous(), deltas.contiguous()
    _launch(
        _gradient_kernel, scores.shape, scores, grad_weights, weights, grad_scores, log_sums, deltas, scale
    )


@on_its_device
def row_products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """What vae.ops.attention_torch.row_products does; `out` is dense."""
    _launch(_row_products_kernel, a.shape, a.contiguous(), b.contiguous(), out)


def _launch(kernel, shape: torch.Size, *arguments) -> None:
    """Run a kernel over the rows of dense tensors of this shape."""
    rows, columns = shape[0] * shape[1], shape[2]
    tile = row_tile(columns)
    grid = (triton.cdiv(rows, tile.rows),)
    kernel[grid](
        *arguments,
        rows,
        columns,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=1,
    )
