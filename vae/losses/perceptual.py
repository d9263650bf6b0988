"""LPIPS (Zhang et al. 2018) for training: same values as the package, finite gradients, little memory.

It needs less memory than the package: the target's features have no graph, normalized features are
recomputed instead of saved, pooling saves no indices, and the trunk may be bf16 or fp16.

Shapes: B images, C channels of a feature map, h x w its height and width.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from vae.config.options import LossConfig
from vae.losses.dino import build_dino
from vae.losses.feature_distance import FeatureDistance
from vae.losses.terms import LossTerms, TermFunction
from vae.losses.trunk_weights import load_trunk_weights
from vae.ops.library import once_differentiable
from vae.ops.shapes import Images, PerImage
from vae.system.errors import UserError

# Mean and deviation of ImageNet's colors, for images in [-1, 1]: LPIPS was calibrated with these constants.
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
RANDOM_TRUNK_SEED = 20180611
RANDOM_NOTE = "--perceptual_net random: LPIPS has random weights, its values cannot be compared with others"


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `perceptual_weight` (vae/losses/terms.py)."""
    if loss.perceptual_net == "dinov2-s":
        return "DINOv2-S", build_dino(loss.perceptual_weights, dtype, device)
    network = build_perceptual(loss.perceptual_net, loss.perceptual_weights, dtype, device)
    return f"LPIPS ({loss.perceptual_net})", network


def lpips_of(terms: LossTerms) -> "PerceptualLoss | None":
    """LPIPS, if it is part of the loss."""
    return next((network for network in terms.networks() if isinstance(network, PerceptualLoss)), None)


class Trunk(NamedTuple):
    """A torchvision classifier; LPIPS reads its `features` after the layers `ends`."""

    model: Callable[..., nn.Module]
    ends: tuple[int, ...]
    widths: tuple[int, ...]
    smallest_side: int  # px; the last layer has no output for smaller images


TRUNKS = {
    "vgg": Trunk(models.vgg16, (4, 9, 16, 23, 30), (64, 128, 256, 512, 512), 16),
    "alex": Trunk(models.alexnet, (2, 5, 8, 10, 12), (64, 192, 384, 256, 256), 31),
    "squeeze": Trunk(models.squeezenet1_1, (2, 5, 8, 10, 11, 12, 13), (64, 128, 256, 384, 384, 512, 512), 17),
}


class PerceptualLoss(nn.Module):
    """LPIPS distance of each image; frozen, and the same in training and evaluation."""

    shift: Tensor
    scale: Tensor

    def __init__(
        self, trunk: Trunk, features: nn.Sequential, linears: list[Tensor], dtype: torch.dtype
    ) -> None:
        """Split `features` at `trunk.ends` and store them in `dtype`; `linears` has one (C,) per slice."""
        super().__init__()
        self.smallest_side = trunk.smallest_side
        starts = (0, *trunk.ends[:-1])
        self.slices = nn.ModuleList(
            nn.Sequential(*(_lean(layer) for layer in features[start:end]))
            for start, end in zip(starts, trunk.ends, strict=True)
        )
        # the results then have this layout too, whatever the images have
        self.slices.to(dtype).to(memory_format=torch.channels_last)
        sum_dtype = torch.promote_types(dtype, torch.float32)
        device = linears[0].device
        for index, linear in enumerate(linears):
            self.register_buffer(f"linear{index}", linear.to(sum_dtype))
        for name, colors in (("shift", SHIFT), ("scale", SCALE)):
            values = torch.tensor(colors, dtype=sum_dtype, device=device).view(1, 3, 1, 1)
            self.register_buffer(name, values)
        self.dtype = dtype
        self.requires_grad_(False).eval()

    def forward(self, recon: Images, images: Images) -> PerImage:
        """Distance of `recon` from `images`, both in [-1, 1], at least fp32.

        Only `recon` gets a gradient. The trunk computes in its own dtype. Raises UserError if the images are
        smaller than the trunk supports.
        """
        assert recon.shape == images.shape, f"{tuple(recon.shape)} differs from {tuple(images.shape)}"
        height, width = recon.shape[2:]
        if min(height, width) < self.smallest_side:
            raise UserError(
                f"images of {width} x {height} px are too small for this --perceptual_net, which needs at "
                f"least {self.smallest_side} px per side: increase --image_size or choose another network"
            )
        features = self._scaled(recon)
        with torch.no_grad():
            target = self._scaled(images)
        distance = torch.zeros((), dtype=self.scale.dtype, device=recon.device)
        for index, layers in enumerate(self.slices):
            with torch.no_grad():
                target = layers(target)  # (B, C, h, w)
            features = layers(features)  # (B, C, h, w)
            distance = distance + FeatureDistance.apply(features, target, getattr(self, f"linear{index}"))
        return distance  # (B,)

    def _scaled(self, images: Tensor) -> Tensor:
        return ((images - self.shift) / self.scale).to(self.dtype)


def build_perceptual(
    net: str, weights_path: str | os.PathLike[str] | None, dtype: torch.dtype, device: torch.device | str
) -> PerceptualLoss:
    """LPIPS with trunk `net` (vgg, alex, squeeze, random), stored and computed in `dtype` on `device`.

    Raises UserError if the weights are missing, damaged or those of another network. On the meta device it
    reads no file. `random` is vgg with fixed random weights: wherever its values are shown, add this fact.
    """
    name = "vgg" if net == "random" else net
    trunk = TRUNKS[name]
    with torch.device("meta"):
        features = trunk.model(weights=None).features
    assert isinstance(features, nn.Sequential)
    if torch.device(device).type == "meta":
        linears = [torch.empty(width, device="meta") for width in trunk.widths]
        return PerceptualLoss(trunk, features, linears, dtype)
    if net == "random":
        features.load_state_dict(_random_weights(features), assign=True)
    else:
        load_trunk_weights(features, net, weights_path)
    return PerceptualLoss(trunk, features, _linear_weights(name, trunk.widths), dtype).to(device)


class _MaxPool(torch.autograd.Function):
    """Max pooling that recomputes its indices in backward; PyTorch's own saves 8 bytes per output."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, window: int, stride: int, ceil_mode: bool) -> Tensor:
        ctx.save_for_backward(images)
        ctx.shape = (window, stride, 0, 1, ceil_mode)  # window, stride, padding, dilation
        return F.max_pool2d(images, *ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (images,) = ctx.saved_tensors
        window, stride, padding, dilation, ceil_mode = ctx.shape
        _, indices = F.max_pool2d(images, *ctx.shape, return_indices=True)
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        sides = ([window, window], [stride, stride], [padding, padding], [dilation, dilation])
        return backward(grad, images, *sides, ceil_mode, indices), None, None, None


class LeanMaxPool(nn.Module):
    """nn.MaxPool2d without padding; its graph saves only its input."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        assert (pool.padding, pool.dilation) == (0, 1)
        self.window, self.stride, self.ceil_mode = pool.kernel_size, pool.stride, pool.ceil_mode

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, C, h', w')."""
        return _MaxPool.apply(images, self.window, self.stride, self.ceil_mode)


def _lean(layer: nn.Module) -> nn.Module:
    return LeanMaxPool(layer) if isinstance(layer, nn.MaxPool2d) else layer


def _random_weights(features: nn.Module) -> dict[str, Tensor]:
    """Normal weights (He et al. 2015) and zero biases, always the same: they have their own generator."""
    generator = torch.Generator().manual_seed(RANDOM_TRUNK_SEED)
    weights = {}
    for name, parameter in features.state_dict().items():
        weights[name] = torch.zeros(parameter.shape)
        if parameter.dim() == 4:
            deviation = (2 / parameter[0].numel()) ** 0.5
            weights[name].normal_(0, deviation, generator=generator)
    return weights


def _linear_weights(name: str, widths: tuple[int, ...]) -> list[Tensor]:
    """The calibrated (C,) weights per slice, version 0.1, from the files of the installed lpips package."""
    package = importlib.util.find_spec("lpips")
    if package is None or package.origin is None:
        raise UserError("LPIPS needs the lpips package for its weights: pip install lpips")
    path = Path(package.origin).parent / "weights" / "v0.1" / f"{name}.pth"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        linears = [state[f"lin{index}.model.1.weight"].flatten() for index in range(len(widths))]
    except (OSError, RuntimeError, KeyError, EOFError) as error:
        raise UserError(f"{path} is missing or damaged: pip install --force-reinstall lpips") from error
    assert tuple(len(linear) for linear in linears) == widths
    return linears
