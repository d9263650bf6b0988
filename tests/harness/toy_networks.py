"""Networks and inputs of one step that take milliseconds, for tests of the step and of what it promises."""

from functools import cache

import torch

from vae.config.options import LossConfig, ModelConfig
from vae.losses.perceptual import PerceptualLoss, build_perceptual
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.step import Networks, StepInputs

MODEL = ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, z_channels=4)
ALL_LOSSES = LossConfig(
    perceptual_weight=0.7, perceptual_net="random", kl_weight=1e-3, adversarial_weight=0.5
)


def toy_networks(
    dtype: torch.dtype = torch.float64,
    *,
    perceptual: bool = True,
    discriminator: bool = True,
    channels_last: bool = False,
    model: ModelConfig = MODEL,
) -> Networks:
    """The same seeded networks on every call; fp64 ones are fp64 throughout, others keep fp32 weights."""
    torch.manual_seed(0)
    weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Networks(
        AutoencoderKL(model).to(weights_dtype),
        Discriminator(8, 2).to(weights_dtype) if discriminator else None,
        random_lpips(dtype) if perceptual else None,
        dtype,
        channels_last,
    )


@cache
def random_lpips(dtype: torch.dtype) -> PerceptualLoss:
    """LPIPS with its random trunk; frozen, so all tests may share it."""
    return build_perceptual("random", None, dtype, "cpu")


def toy_inputs(
    batch: int = 4, size: int = 16, *, factor: float | None = 0.3, loss_scale: float = 1.0, model=MODEL
) -> StepInputs:
    """Seeded images and noise of one step; `factor` weighs the adversarial term, None: not begun."""
    generator = torch.Generator().manual_seed(1)
    latent = size // 2 ** (len(model.channels) - 1)
    return StepInputs(
        images=torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=generator),
        noise=torch.randn(batch, model.z_channels, latent, latent, generator=generator, dtype=torch.float64),
        image_share=1 / batch,
        loss_scale=torch.tensor(loss_scale),
        adversarial_factor=None if factor is None else torch.tensor(factor, dtype=torch.float64),
    )


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by parameter name; a parameter without one is left out."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def relative_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all tensors together over the norm of `expected`."""
    assert found.keys() == expected.keys()
    difference = torch.stack([(found[n].double() - expected[n].double()).norm() for n in expected]).norm()
    return float(difference / torch.stack([value.double().norm() for value in expected.values()]).norm())
