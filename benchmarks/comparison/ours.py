"""The work of one step, the same for both sides, and our side: the trainer's step with its own networks.

Shapes: B images, H x W pixels (square), Z latent channels.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig, OptimConfig
from vae.losses.terms import build_terms
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.model.discriminator import Discriminator
from vae.model.initialization import initialize
from vae.step import Networks, StepInputs, compute_gradients, micro_batch_sizes
from vae.training.precision import compile_in_place
from vae.training.schedule import REFERENCE_PEAK
from vae.update import UpdateState, apply_update

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
        side = self.image_size // self.model.downsampling
        shape = (self.batch, self.model.z_channels, side, side)
        if device.type == "meta":
            return torch.empty(shape, device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + 1)).to(device)


class Ours:
    """Networks, optimizers and one batch of `work`; weights are fp32, and `dtype` is the compute dtype."""

    def __init__(
        self,
        work: Work,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        recompute: str = "none",
        channels_last: bool = True,
        micro_batch: int | None = None,
        compiled: bool = False,
    ):
        self.work = work
        self.sizes = micro_batch_sizes(work.batch, micro_batch or work.batch)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        autoencoder, discriminator = _networks(work, device)
        autoencoder.to(device, memory_format=layout)
        set_recompute(autoencoder, recompute)
        if discriminator is not None:
            discriminator.to(device, memory_format=layout)
        terms = build_terms(work.loss, dtype, device)
        self.networks = Networks(autoencoder, discriminator, terms, dtype, channels_last)
        self.inputs = StepInputs(
            images=work.images(device),
            noise=work.noise(device),
            image_share=1 / work.batch,
            loss_scale=torch.ones((), device=device),
            adversarial_factor=torch.ones((), device=device) if work.adversarial else None,
        )
        if compiled:
            compile_in_place(autoencoder)
        if device.type != "meta":
            trained = [network for network in (autoencoder, discriminator) if network is not None]
            self.optim = OptimConfig()
            self.optimizers = [
                torch.optim.AdamW(network.parameters(), REFERENCE_PEAK, fused=True) for network in trained
            ]
            self.update = UpdateState.begin(device, fp16=False)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Forward, losses and backward; returns the sums of the loss terms."""
        return compute_gradients(self.networks, self.inputs, self.sizes).losses

    def step(self) -> None:
        """One whole step: gradients, clipping, update."""
        self.gradients()
        apply_update(self.optimizers, self.update, self.optim, fp16=False, empty=False)

    def clear(self) -> None:
        """Delete the gradients."""
        for network in (self.networks.autoencoder, self.networks.discriminator):
            if network is not None:
                network.zero_grad(set_to_none=True)


def _networks(work: Work, device: torch.device) -> tuple[AutoencoderKL, Discriminator | None]:
    meta = device.type == "meta"
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        autoencoder = AutoencoderKL(work.model)
        loss = work.loss
        discriminator = Discriminator(loss.disc_channels, loss.disc_layers) if work.adversarial else None
    if not meta:
        initialize(autoencoder, "default", SEED)
    return autoencoder, discriminator
