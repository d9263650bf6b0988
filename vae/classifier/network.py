"""The classifier of a recipe: stages of ConvNeXt or residual blocks on latents.

Shapes: B latents of Z channels and h x h positions, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vae.evaluation.probe.heads import BLOCKS, HEADS
from vae.system.errors import UserError

MOST_POSITIONS = 32  # side of the first stage: larger latents are cut into patches, as images are in ConvNeXt


@dataclass(frozen=True)
class NetworkShape:
    """What decides the layers."""

    head: str  # of HEADS; convnext and resnet have stages
    channels: int  # Z
    side: int  # h
    classes: int  # K
    widths: tuple[int, ...]
    depths: tuple[int, ...]


class LatentClassifier(nn.Module):
    """Standardized latents (B, Z, h, h) to logits (B, K) in fp32; the layers compute in `dtype`."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: NetworkShape, mean: Tensor, std: Tensor):
        """`mean`, `std`: (1, Z, 1, 1), of the training images."""
        super().__init__()
        self.layers = _layers(shape)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, latents: Tensor, dtype: torch.dtype) -> Tensor:
        standardized = (latents.float() - self.mean) / self.std
        return self.layers(standardized.to(dtype)).float()


def check_shape(shape: NetworkShape) -> None:
    """Raise UserError if the latents are too small for the stages."""
    stages = len(shape.widths)
    if shape.head in BLOCKS and shape.side // _patch(shape.side) < 2 ** (stages - 1):
        raise UserError(
            f"--probe_widths has {stages} stages, each half as large as the one before, and latents have "
            f"only {shape.side} x {shape.side} positions: give fewer widths and depths, or larger --sizes"
        )


def _patch(side: int) -> int:
    """Side of the patches that become the first stage."""
    return -(-side // MOST_POSITIONS)


def _layers(shape: NetworkShape) -> nn.Module:
    if shape.head not in BLOCKS:
        return HEADS[shape.head](shape.channels, shape.side, shape.classes)
    block, widths = BLOCKS[shape.head], shape.widths
    layers: list[nn.Module] = [_stem(shape.channels, widths[0], _patch(shape.side))]
    for stage, (width, depth) in enumerate(zip(widths, shape.depths, strict=True)):
        if stage:
            before = widths[stage - 1]
            layers += [nn.GroupNorm(1, before), nn.Conv2d(before, width, 2, stride=2)]
        layers += [block(width) for _ in range(depth)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1])]
    layers.append(nn.Linear(widths[-1], shape.classes))
    network = nn.Sequential(*layers)
    _initialize(network)
    return network


def _stem(channels: int, width: int, patch: int) -> nn.Module:
    """Latents to the first stage, (B, width, h / patch, h / patch)."""
    if patch == 1:
        return nn.Conv2d(channels, width, 3, padding=1)
    return nn.Conv2d(channels, width, patch, stride=patch)


def _initialize(network: nn.Module) -> None:
    """Small weights, as in ConvNeXt: each block begins near the identity."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def parameter_groups(model: nn.Module, weight_decay: float) -> Sequence[dict[str, object]]:
    """Matrices and convolutions with weight decay; norms and biases without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
