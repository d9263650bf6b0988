"""Layers that keep fp32 parameters and compute in the dtype of their input.

Casting at the few places that compute, here and in vae.ops, keeps the master weights whole: no autocast.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vae.ops.attention import attention
from vae.ops.fused_conv import norm_silu_conv, same_conv
from vae.ops.norm import group_norm, group_norm_silu
from vae.ops.resample import downsample_conv, upsample_conv
from vae.ops.residual_block import residual_block

NORM_EPS = 1e-6  # AutoencoderKL's own, in diffusers and CompVis alike


class Conv2d(nn.Conv2d):
    """Convolution in the dtype of its input; where it keeps the sides its graph holds no cast weights."""

    @property
    def keeps_sides(self) -> bool:
        size = self.kernel_size[0]
        square = (self.stride, self.kernel_size) == ((1, 1), (size, size))
        return square and self.padding == (size // 2, size // 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.keeps_sides and self.bias is not None:
            return same_conv(h, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(h.dtype)
        return F.conv2d(h, self.weight.to(h.dtype), bias, self.stride, self.padding)


class Linear(nn.Linear):
    """Matrix product in the dtype of its input."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h, self.weight.to(h.dtype), self.bias.to(h.dtype))


class GroupNorm(nn.GroupNorm):
    """Normalisation in the dtype of its input, fp32 statistics."""

    def __init__(self, groups: int, channels: int):
        super().__init__(groups, channels, eps=NORM_EPS)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm(h, self.weight, self.bias, self.num_groups, self.eps)


class NormSiLU(GroupNorm):
    """GroupNorm followed by SiLU."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm_silu(h, self.weight, self.bias, self.num_groups, self.eps)


def activated_conv(norm: NormSiLU, conv: Conv2d, h: torch.Tensor, recompute: bool) -> torch.Tensor:
    """conv(norm(h)); with `recompute` the activation in between is not kept for the backward."""
    if recompute:
        return norm_silu_conv(h, norm.weight, norm.bias, conv.weight, conv.bias, norm.num_groups, norm.eps)
    return conv(norm(h))


def maybe_checkpoint(part: Callable, h: torch.Tensor, checkpointed: bool) -> torch.Tensor:
    """part(h); with `redone` only h is kept, and the backward runs the part again first.

    torch's checkpoint with its hooks on saved tensors, not the reentrant form: parameters' gradients then
    belong to the one outer backward, which is what DDP listens to. Nothing random happens in the networks.
    """
    if checkpointed and torch.is_grad_enabled():
        return checkpoint(part, h, use_reentrant=False, preserve_rng_state=False)
    return part(h)


class ResnetBlock(nn.Module):
    """norm-SiLU-conv twice, added to the input; a 1x1 convolution carries a change of width."""

    def __init__(self, in_channels: int, out_channels: int, groups: int):
        super().__init__()
        self.norm1 = NormSiLU(groups, in_channels)
        self.conv1 = Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = NormSiLU(groups, out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None
        self.recompute = "none"  # or "activations", or "block": all but x; see vae.model.recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "block":
            layers = [self.norm1, self.conv1, self.norm2, self.conv2]
            layers += [] if self.conv_shortcut is None else [self.conv_shortcut]
            parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
            return residual_block(x, parameters, self.norm1.num_groups, self.norm1.eps)
        recompute = self.recompute == "activations"
        h = activated_conv(self.norm1, self.conv1, x, recompute)
        h = activated_conv(self.norm2, self.conv2, h, recompute)
        h += x if self.conv_shortcut is None else self.conv_shortcut(x)
        return h


class Attention(nn.Module):
    """One-head self-attention over all positions, added to the input."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = GroupNorm(groups, channels)
        self.to_q = Linear(channels, channels)
        self.to_k = Linear(channels, channels)
        self.to_v = Linear(channels, channels)
        self.to_out = nn.ModuleList([Linear(channels, channels)])  # diffusers' name: to_out.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        tokens = self.group_norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        h = attention(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens))
        h = self.to_out[0](h)  # (B, N, C)
        return x + h.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


class Downsample(nn.Module):
    """Halves both sides."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, stride=2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return downsample_conv(h, self.conv.weight, self.conv.bias)  # (B, C, H/2, W/2)


class Upsample(nn.Module):
    """Doubles both sides."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return upsample_conv(h, self.conv.weight, self.conv.bias)  # (B, C, 2H, 2W)
