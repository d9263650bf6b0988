"""The network of a probe: torchvision's ConvNeXt on latents, and the recipes that train it.

Shapes: B latents of Z channels and h x h positions, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from vae.config.evaluate_flags import EvaluateConfig
from vae.system.errors import UserError

Forward = Callable[[Tensor], Tensor]  # standardized latents (B, Z, h, h) -> logits fp32 (B, K)


@dataclass(frozen=True)
class Recipe:
    """How the network is trained; flags decide `epochs`, `learning_rate`, `batch_size` and the stages."""

    epochs: int
    learning_rate: float  # after the warm-up
    batch_size: int  # images per optimizer step
    widths: tuple[int, ...]  # channels of each stage
    depths: tuple[int, ...]  # blocks of each stage
    warmup_epochs: float
    positions: int  # side of the first stage: larger latents are cut into patches, as images are in ConvNeXt
    layer_scale: float
    mixup: float = 0.8  # alpha of the Beta distribution
    drop_path: float = 0.1  # of the last block
    erasing: float = 0.0  # share of the images that lose a region
    smallest_crop: float = 1.0  # share of the area; 1: no crops
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    ema_decay: float = 0.9999


def recipe_of(config: EvaluateConfig, images: int) -> Recipe:
    """The recipe of --probe_profile, or that of a small network, for so many training images."""
    chosen: dict[str, Any] = {
        "epochs": config.probe_epochs,
        "learning_rate": config.probe_learning_rate,
        "batch_size": min(config.probe_batch_size, images),
        "widths": config.probe_widths,
        "depths": config.probe_depths,
    }
    if config.probe_profile is None:
        return Recipe(**chosen, warmup_epochs=2, positions=8, layer_scale=0.1, mixup=0.2, label_smoothing=0.0)
    # ConvNeXt-T of Liu et al. 2022, table 5, without RandAugment and CutMix, which need pixels.
    return Recipe(**chosen, warmup_epochs=5, positions=32, layer_scale=1e-6, erasing=0.25, smallest_crop=0.08)


@dataclass(frozen=True)
class NetworkShape:
    """What decides the layers."""

    channels: int  # Z
    side: int  # h
    classes: int  # K
    recipe: Recipe

    @property
    def patch(self) -> int:
        """Side of the patches that become the first stage."""
        return -(-self.side // self.recipe.positions)

    def check(self) -> None:
        """Raise UserError if the latents are too small for the stages."""
        stages = len(self.recipe.widths)
        if self.side // self.patch < 2 ** (stages - 1):
            raise UserError(
                f"--probe_widths has {stages} stages, each half as large as the one before, and latents have "
                f"only {self.side} x {self.side} positions: give fewer widths and depths, or larger --sizes"
            )


class LatentClassifier(nn.Module):
    """Standardized latents (B, Z, h, h) to logits (B, K); the layers compute in the dtype of the latents."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: NetworkShape, mean: Tensor, std: Tensor):
        """`mean`, `std`: (1, Z, 1, 1), of the training images."""
        super().__init__()
        recipe, patch = shape.recipe, shape.patch
        stages = zip(recipe.widths, [*recipe.widths[1:], None], recipe.depths, strict=True)
        self.layers = ConvNeXt(
            [CNBlockConfig(*stage) for stage in stages],
            stochastic_depth_prob=recipe.drop_path,
            layer_scale=recipe.layer_scale,
            num_classes=shape.classes,
        )
        kernel, padding = (3, 1) if patch == 1 else (patch, 0)
        stem = nn.Conv2d(shape.channels, recipe.widths[0], kernel, patch, padding)
        nn.init.trunc_normal_(stem.weight, std=0.02)  # as torchvision's
        self.layers.features[0][0] = stem  # that of images has 3 channels and is 4 times smaller
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def standardized(self, latents: Tensor) -> Tensor:
        """fp32 with mean 0 and standard deviation 1 in each channel."""
        return (latents.float() - self.mean) / self.std

    def forward(self, latents: Tensor) -> Tensor:
        return self.layers(latents)


def forward_of(model: nn.Module, dtype: torch.dtype, is_compiled: bool = False) -> Forward:
    """The network with its fp32 weights cast to `dtype` in each call; gradients are fp32."""

    def forward(latents: Tensor) -> Tensor:
        weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
        return functional_call(model, weights, (latents.to(dtype),)).float()

    if not is_compiled:
        return forward
    # Each VAE needs code for its weights and its EMA weights, at two sizes of a pass: PyTorch's limit is 8.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(forward, dynamic=False)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and convolutions with weight decay; norms, biases and layer scales without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim in (2, 4)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim not in (2, 4)], "weight_decay": 0.0},
    ]
