"""Seeded inputs of operations, and their results with gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# CUDA C++ programming guide, table of compute capabilities: the most shared memory of one block on sm_120
# (RTX 50), 99 KiB. Hopper and the data-centre Blackwells have 227 KiB.
SHARED_MEMORY_BYTES = 101_376
LAYOUTS = [torch.contiguous_format, torch.channels_last]
GROUPS, EPS = 4, 1e-6  # of the norms in norm_silu_conv and residual_block
RESIDUAL_BLOCK_SHAPES = [
    (1, 8, 12, 7, 9),
    (2, 8, 8, 1, 5),
    (3, 12, 8, 16, 6),
    (1, 8, 8, 9, 9),
]  # (B, C, C', H, W)
NORM_SILU_CONV_SHAPES = [(1, 8, 12, 7, 9), (2, 12, 8, 1, 5), (3, 8, 8, 16, 6)]
RESAMPLE_SHAPES = [
    ((1, 3, 5, 7), 4),
    ((2, 5, 1, 3), 2),
    ((3, 2, 8, 6), 7),
    ((2, 6, 9, 1), 6),
]  # (B, C, H, W), C'


def conv_inputs(
    shape: tuple[int, ...], out_channels: int, dtype: torch.dtype = torch.float64, size: int = 3
) -> list[Tensor]:
    """h (B, C, H, W), weight and bias of a convolution with `size` x `size` kernels, with gradient."""
    return _drawn([shape, (out_channels, shape[1], size, size), (out_channels,)], dtype)


def norm_silu_conv_inputs(shape: tuple[int, ...], **options) -> list[Tensor]:
    """h, norm weight and bias, convolution weight and bias, with gradient; `shape` is (B, C, C', H, W)."""
    batch, width, out, height, side = shape
    return _drawn([(batch, width, height, side), (width,), (width,), (out, width, 3, 3), (out,)], **options)


def residual_block_inputs(shape: tuple[int, ...], **options) -> list[Tensor]:
    """x and the block's parameters, with gradient; `shape` is (B, C, C', H, W)."""
    batch, width, out, height, side = shape
    shapes = [(batch, width, height, side), (width,), (width,), (out, width, 3, 3), (out,)]
    shapes += [(out,), (out,), (out, out, 3, 3), (out,)]
    shapes += [(out, width, 1, 1), (out,)] if out != width else []
    return _drawn(shapes, **options)


def _drawn(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float64,
    weights_dtype: torch.dtype | None = None,
    layout: torch.memory_format = torch.contiguous_format,
    device: str = "cpu",
) -> list[Tensor]:
    """The first tensor is the input, in `dtype` and `layout`; the others are weights in `weights_dtype`."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    h, *weights = (
        t.to(device, weights_dtype or dtype) if i else t.to(device, dtype) for i, t in enumerate(drawn)
    )
    return [t.requires_grad_() for t in (h.contiguous(memory_format=layout), *weights)]


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a random projection of it."""
    out = function(*inputs)
    projection = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad((out * projection.to(out.dtype)).sum(), inputs)]


def relative_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Sum of the relative errors of all results, each in the Euclidean norm."""
    pairs = zip(results, exact, strict=True)
    return sum(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)
