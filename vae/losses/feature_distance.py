"""The distance of two feature maps in LPIPS, as one operation that saves only its inputs.

PyTorch operations compute it in pieces of limited size.

Shapes: B images, C channels of a feature map, h x w its height and width; b images of a piece.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vae.ops.library import has_no_data, kernel_module, once_differentiable, row_tile, uses_triton


class FeatureDistance(torch.autograd.Function):
    """Weighted squared distance of unit-length features, mean over positions."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, target: Tensor, linear: Tensor) -> Tensor:
        """(B, C, h, w) twice and (C,) -> (B,) in the dtype of `linear`."""
        ctx.save_for_backward(features, target, linear)
        if has_no_data(features):
            return _partial_sums(features, linear).sum(1)
        return backend(features).distance(features, target, linear)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        features, target, linear = ctx.saved_tensors
        if has_no_data(features):
            return torch.empty_like(features), None, None
        return backend(features).feature_gradient(grad, features, target, linear), None, None


def backend(features: Tensor) -> ModuleType:
    """The module that computes distances: Triton kernels on a GPU if possible, else this one."""
    has_kernels = uses_triton("feature_distance", features)
    return kernel_module("vae.losses.feature_distance_triton" if has_kernels else __name__)


def _partial_sums(features: Tensor, linear: Tensor) -> Tensor:
    """On meta, the only scratch of the kernels: one sum for each program."""
    batch, channels, height, width = features.shape
    return linear.new_empty(batch, -(-height * width // row_tile(channels).rows))


# Added to the squared norm, so that the gradient is finite if all features are zero. The package divides by
# norm + 1e-10, and its gradient is NaN there. At a norm of 1 the two values differ in the 11th digit.
EPS = 1e-10
# Elements of a feature map normalized at a time. GPU: 16 MiB for each of the three fp32 temporaries. CPU, per
# thread: 2 MiB, a share of a third-level cache; on one core of an AMD EPYC, 2**18 to 2**20 are equally fast.
GPU_PIECE_ELEMENTS = 2**22
CPU_PIECE_ELEMENTS = 2**19


def distance(features: Tensor, target: Tensor, linear: Tensor) -> Tensor:
    """(B, C, h, w) twice and (C,) -> (B,) in the dtype of `linear`."""
    total = linear.new_zeros(features.shape[0])
    pieces = _pieces(features)
    buffers = _buffers(features[pieces[0]], linear.dtype, 2)
    for piece in pieces:
        difference, target_unit = _cast(features[piece], buffers[0]), _cast(target[piece], buffers[1])
        _to_unit_length(difference)
        _to_unit_length(target_unit)
        difference -= target_unit
        total[piece[0]] += torch.einsum("bchw,c->b", difference.square_(), linear)
    return total / (features.shape[2] * features.shape[3])


def feature_gradient(grad: Tensor, features: Tensor, target: Tensor, linear: Tensor) -> Tensor:
    """Gradient of `features` from that of their distance, (B,), in their dtype and layout."""
    per_image = 2 * grad / (features.shape[2] * features.shape[3])  # (B,)
    pieces = _pieces(features)
    buffers = _buffers(features[pieces[0]], linear.dtype, 3)
    grad_features = torch.empty_like(features)
    for piece in pieces:
        unit, slope = _cast(features[piece], buffers[0]), _cast(target[piece], buffers[1])
        inverse_norm = _to_unit_length(unit)
        _to_unit_length(slope)
        torch.sub(unit, slope, out=slope).mul_(linear.view(1, -1, 1, 1))
        # d(f/n)/df = (1 - u u^T)/n, with u = f/n
        along = torch.mul(unit, slope, out=_rows(buffers[2], slope)).sum(1, keepdim=True)
        slope -= unit.mul_(along)
        slope *= inverse_norm * per_image[piece[0]].view(-1, 1, 1, 1)
        grad_features[piece] = slope
    return grad_features


def _pieces(features: Tensor) -> list[tuple[slice, slice, slice]]:
    """Slices of a (B, C, h, w) tensor by image and rows; the first one is the largest."""
    batch, channels, height, width = features.shape
    on_cpu = features.device.type == "cpu"
    most = CPU_PIECE_ELEMENTS * torch.get_num_threads() if on_cpu else GPU_PIECE_ELEMENTS
    if batch * channels * height * width <= most:
        return [(slice(None), slice(None), slice(None))]
    rows = max(most // (channels * width), 1)
    return [
        (slice(image, image + 1), slice(None), slice(top, top + rows))
        for image in range(batch)
        for top in range(0, height, rows)
    ]


def _buffers(piece: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Buffers that all pieces share: on a CPU, new tensors for each piece cost as much as the arithmetic."""
    return [torch.empty_like(piece, dtype=dtype) for _ in range(count)]


def _rows(buffer: Tensor, piece: Tensor) -> Tensor:
    """The first rows of `buffer`, as many as the piece has."""
    return buffer[:, :, : piece.shape[2]]


def _cast(piece: Tensor, buffer: Tensor) -> Tensor:
    """The piece in the dtype of `buffer`, copied there."""
    return _rows(buffer, piece).copy_(piece)


def _to_unit_length(features: Tensor) -> Tensor:
    """Divide (b, C, h, w) features by their length at each position; return 1 / length, (b, 1, h, w)."""
    norm = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    inverse_norm = norm.square_().add_(EPS).rsqrt_()
    features *= inverse_norm
    return inverse_norm
