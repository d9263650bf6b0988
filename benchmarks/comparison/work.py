"""The work of one step, the same for both sides: images, noise, networks and loss weights.

Shapes: B images, H x W pixels (square), Z latent channels.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vae.config.options import LossConfig, ModelConfig
from vae.model.autoencoder import downsampling

SEED = 0
PERCEPTUAL_SCALE = 0.5  # default of diffusers' script
WAN_OPTIONS: dict[str, Any] = {"family": "wan", "channels": (96, 192, 384, 384), "use_quant_conv": True}


@dataclass(frozen=True)
class Work:
    """The work of one step. Both projects train the default network; tests use a small one."""

    image_size: int
    batch: int = 1
    perceptual: bool = True
    adversarial: bool = False
    model: ModelConfig = field(default_factory=lambda: ModelConfig(init="default"))

    @property
    def values(self) -> int:
        """Number of values of one image: three colors per pixel."""
        return 3 * self.image_size**2

    @property
    def loss(self) -> LossConfig:
        """Our loss, a mean per image. Theirs is `values` times as large; clipping removes the factor."""
        return LossConfig(
            perceptual_weight=PERCEPTUAL_SCALE if self.perceptual else 0.0,
            perceptual_net="random",  # the same trunk on both sides, without a download
            adversarial_weight=1.0 if self.adversarial else 0.0,
        )

    def images(self, device: torch.device) -> torch.Tensor:
        """(B, 3, H, W) uint8: smooth colors with some noise, always the same."""
        shape = (self.batch, 3, self.image_size, self.image_size)
        if device.type == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=device)
        random = torch.Generator().manual_seed(SEED)
        coarse = torch.rand(self.batch, 3, 8, 8, generator=random)
        smooth = torch.nn.functional.interpolate(coarse, shape[2:], mode="bicubic")
        noise = torch.randn(shape, generator=random) * 0.05
        return ((smooth + noise).clamp(0, 1) * 255).to(torch.uint8).to(device)

    def noise(self, device: torch.device) -> torch.Tensor:
        """(B, Z, H/f, W/f) fp32 standard normal, always the same."""
        side = self.image_size // downsampling(self.model)
        shape = (self.batch, self.model.z_channels, side, side)
        if device.type == "meta":
            return torch.empty(shape, device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + 1)).to(device)
