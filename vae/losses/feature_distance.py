"""The distance of two feature maps in LPIPS, as one operation that saves only its inputs.

Shapes: B images, C channels of a feature map, h x w its height and width.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vae.losses import feature_distance_torch
from vae.ops.gpu_blocks import row_tile
from vae.ops.library import has_no_data, kernel_module, once_differentiable, uses_triton


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
    """The module that computes distances: Triton kernels on a GPU if possible, else PyTorch operations."""
    if uses_triton("feature_distance", features):
        return kernel_module("vae.losses.feature_distance_triton")
    return feature_distance_torch


def _partial_sums(features: Tensor, linear: Tensor) -> Tensor:
    """On meta, the only scratch of the kernels: one sum for each program."""
    batch, channels, height, width = features.shape
    return linear.new_empty(batch, -(-height * width // row_tile(channels).rows))
