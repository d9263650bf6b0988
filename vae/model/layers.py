"""Layers with fp32 parameters that compute in the dtype of their input.

Each layer, and each operation of vae.ops, casts the weights it uses. The master weights stay fp32 without
autocast.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vae.ops.attention import attention
from vae.ops.fused_conv import downsample_conv, norm_silu_conv, same_conv, upsample_conv
from vae.ops.norm import group_norm, group_norm_silu
from vae.ops.residual_block import residual_block


class RMSNorm(nn.Module):
    """RMS norm in the dtype of its input, computed in at least fp32."""

    num_groups = 0
    eps = 0.0
    bias = None

    def __init__(self, channels: int):
        super().__init__()
        self.num_channels = channels
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm(h, self.weight, None, 0, 0.0)


class RMSNormSiLU(RMSNorm):
    """RMSNorm followed by SiLU."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm_silu(h, self.weight, None, 0, 0.0)


NORM_EPS = 1e-6  # as in AutoencoderKL of diffusers and CompVis

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class ModuleList(nn.ModuleList, Generic[AnyModule]):
    """nn.ModuleList for which a type checker knows the type of the elements."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[AnyModule]) -> None: ...

        def __iter__(self) -> Iterator[AnyModule]: ...

        @overload
        def __getitem__(self, index: slice) -> "ModuleList[AnyModule]": ...

        @overload
        def __getitem__(self, index: int) -> AnyModule: ...

        def __getitem__(self, index: int | slice) -> "AnyModule | ModuleList[AnyModule]": ...


class Scaled:
    """A layer whose parameters are multiplied by numbers when it computes: vae.model.activation_scale."""

    weight_scale = 1.0
    bias_scale = 1.0


class Conv2d(Scaled, nn.Conv2d):
    """Convolution in the dtype of its input; if it keeps height and width, no cast weights are saved."""

    @property
    def reflects(self) -> bool:
        """Whether it pads by reflection, which the fused operations of vae.ops do not."""
        return self.padding_mode == "reflect"

    @property
    def keeps_size(self) -> bool:
        size = self.kernel_size[0]
        square = (self.stride, self.kernel_size) == ((1, 1), (size, size))
        return square and self.padding == (size // 2, size // 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.conv2d(h, self.weight.to(h.dtype), None, self.stride, self.padding)
        weight, bias = weight_and_bias(self)
        if self.reflects:
            return F.conv2d(reflected(h), weight.to(h.dtype), bias.to(h.dtype))
        if self.keeps_size:
            return same_conv(h, weight, bias)
        return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), self.stride, self.padding)


def reflected(h: torch.Tensor) -> torch.Tensor:
    """h (B, C, H, W) with a border of one pixel by reflection: (B, C, H + 2, W + 2).

    The backward pass of F.pad adds in a random order on a GPU, so runs would not repeat bit for bit.
    """
    h = torch.cat([h[:, :, 1:2], h, h[:, :, -2:-1]], dim=2)
    return torch.cat([h[..., 1:2], h, h[..., -2:-1]], dim=3)


def reflect_padding(network: nn.Module) -> None:
    """Let all convolutions of `network` that pad by themselves pad by reflection: not those of Downsample."""
    for module in network.modules():
        if isinstance(module, Conv2d) and module.padding != (0, 0):
            module.padding_mode = "reflect"


class Linear(Scaled, nn.Linear):
    """Matrix product in the dtype of its input."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        weight, bias = weight_and_bias(self)
        return F.linear(h, weight.to(h.dtype), bias.to(h.dtype))


class GroupNorm(nn.GroupNorm):
    """Group normalization in the dtype of its input, with fp32 statistics."""

    def __init__(self, groups: int, channels: int, eps: float = NORM_EPS):
        super().__init__(groups, channels, eps=eps)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm(h, self.weight, self.bias, self.num_groups, self.eps)


class NormSiLU(GroupNorm):
    """GroupNorm followed by SiLU."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm_silu(h, self.weight, self.bias, self.num_groups, self.eps)


def build_norm(groups: int, channels: int) -> GroupNorm | RMSNorm:
    """The norm of a network with so many groups; 0: RMS norms."""
    return GroupNorm(groups, channels) if groups else RMSNorm(channels)


def build_norm_silu(groups: int, channels: int) -> NormSiLU | RMSNormSiLU:
    """The same, followed by SiLU."""
    return NormSiLU(groups, channels) if groups else RMSNormSiLU(channels)


def weight_and_bias(layer: Conv2d | Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters with which a layer computes."""
    weight: torch.Tensor = layer.weight
    bias = layer.bias
    assert bias is not None
    if layer.weight_scale != 1.0:
        weight = weight * layer.weight_scale
    return weight, bias if layer.bias_scale == 1.0 else bias * layer.bias_scale


def is_fused(norm: nn.Module, conv: Conv2d) -> bool:
    """Whether an operation of vae.ops computes both: not for reflecting layers and norms of other modules."""
    return isinstance(norm, NormSiLU | RMSNormSiLU) and not conv.reflects


def readout(norm: NormSiLU | RMSNormSiLU, conv: Conv2d, h: torch.Tensor) -> torch.Tensor:
    """conv(norm(h)), the end of a network, finer than bf16; backward recomputes what is between the two."""
    if not is_fused(norm, conv):
        return conv(norm(h.to(torch.promote_types(h.dtype, torch.float32)))).to(h.dtype)
    parameters = (norm.weight, norm.bias, *weight_and_bias(conv))
    return norm_silu_conv(h, *parameters, norm.num_groups, norm.eps)


def maybe_checkpoint(
    function: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor, checkpointed: bool
) -> torch.Tensor:
    """function(h); if `checkpointed`, the graph saves only `h`, and backward runs the function again first.

    The non-reentrant form of PyTorch's checkpoint keeps the gradients of parameters in the one outer
    backward, which DDP observes. The networks draw no random numbers, so no random state is saved.
    """
    if checkpointed and torch.is_grad_enabled():
        return checkpoint(function, h, use_reentrant=False, preserve_rng_state=False)
    return function(h)


class ResnetBlock(nn.Module):
    """norm-SiLU-conv twice, added to the input; a 1x1 convolution adapts the input if the width changes."""

    def __init__(self, in_channels: int, out_channels: int, groups: int):
        super().__init__()
        self.norm1 = build_norm_silu(groups, in_channels)
        self.conv1 = Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = build_norm_silu(groups, out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None
        self.recompute: Literal["none", "activations", "block"] = "none"  # set by set_recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_fused(self.norm1, self.conv1):
            return maybe_checkpoint(self._unfused, x, self.recompute != "none")
        parameters: list[Any] = [self.norm1.weight, self.norm1.bias, *weight_and_bias(self.conv1)]
        parameters += [self.norm2.weight, self.norm2.bias, *weight_and_bias(self.conv2)]
        if self.conv_shortcut is not None:
            parameters += weight_and_bias(self.conv_shortcut)
        return residual_block(x, parameters, self.norm1.num_groups, self.norm1.eps, self.recompute)

    def _unfused(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Module):
    """Self-attention with one head over all positions, added to the input."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = build_norm(groups, channels)
        self.to_q = Linear(channels, channels)
        self.to_k = Linear(channels, channels)
        self.to_v = Linear(channels, channels)
        self.to_out = ModuleList([Linear(channels, channels)])  # a list, because diffusers names it to_out.0
        self.attend = attention  # an attribute, so that torch.compile can leave it out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        tokens = self.group_norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        h = self.attend(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens))
        h = self.to_out[0](h)  # (B, N, C)
        return x + h.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


class Downsample(nn.Module):
    """Convolution that halves height and width."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, stride=2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return downsample_conv(h, *weight_and_bias(self.conv))  # (B, C, H/2, W/2)


class Upsample(nn.Module):
    """Nearest-neighbor upsampling by two, then a convolution."""

    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv = Conv2d(channels, out_channels, 3, padding=1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.conv.reflects:
            return self.conv(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return upsample_conv(h, *weight_and_bias(self.conv))  # (B, C', 2H, 2W)
