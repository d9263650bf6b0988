"""Networks and inputs of one step that takes milliseconds, and the plain formulas of its losses."""

from dataclasses import fields, replace
from functools import cache

import torch
from torch.nn import functional as F

from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig
from vae.losses.dino import DinoDistance, VisionTransformer
from vae.losses.perceptual import PerceptualLoss, build_perceptual, lpips_of
from vae.losses.terms import LossTerms, build_terms
from vae.losses.variance import statistics_of
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.step import Networks, StepInputs

MODEL = ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, z_channels=4)
TERM_WEIGHTS = [item.name for item in fields(LossConfig) if "term" in item.metadata]
ALL_TERMS = LossConfig(**{name: 0.7 for name in TERM_WEIGHTS}, perceptual_net="random")
ALL_LOSSES = replace(ALL_TERMS, reconstruction_weight=1.0, kl_weight=0.25, adversarial_weight=0.5)
NO_LPIPS = replace(ALL_LOSSES, perceptual_weight=0.0)


def toy_networks(
    dtype: torch.dtype = torch.float64,
    *,
    loss: LossConfig = ALL_LOSSES,
    discriminator: bool = True,
    channels_last: bool = False,
    model: ModelConfig = MODEL,
) -> Networks:
    """The same seeded networks at each call; their weights are fp64 if `dtype` is, otherwise fp32."""
    torch.manual_seed(0)
    weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Networks(
        AutoencoderKL(model).to(weights_dtype),
        Discriminator(8, 2).to(weights_dtype) if discriminator else None,
        toy_terms(loss, dtype),
        dtype,
        channels_last,
    )


def toy_terms(loss: LossConfig, dtype: torch.dtype) -> LossTerms:
    """The terms of `loss` on the CPU, with `random_lpips` or `random_dino`."""
    terms = build_terms(loss, dtype, "meta")
    perceptual = random_dino if loss.perceptual_net == "dinov2-s" else random_lpips
    on_cpu = [t._replace(function=perceptual(dtype)) if t.name == "perceptual" else t for t in terms.image]
    return terms._replace(image=tuple(on_cpu))


@cache
def random_lpips(dtype: torch.dtype) -> PerceptualLoss:
    """LPIPS with its random trunk; all tests share it, because it is frozen."""
    return build_perceptual("random", None, dtype, "cpu")


@cache
def random_dino(dtype: torch.dtype) -> DinoDistance:
    """DINOv2's distance with seeded random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = VisionTransformer()
        for weight in network.parameters():
            weight.data += 0.05 * torch.randn_like(weight)  # also those that begin with zeros or ones
    return DinoDistance(network, dtype)


def toy_inputs(
    batch: int = 4,
    size: int = 16,
    *,
    factor: float | None = 0.3,
    loss_scale: float = 1.0,
    model: ModelConfig = MODEL,
) -> StepInputs:
    """Seeded images and noise of one step; `factor` weights the adversarial term; None: not started."""
    generator = torch.Generator().manual_seed(1)
    latent = size // 2 ** (len(model.channels) - 1)
    shape = (batch, model.z_channels, latent, latent)
    images = torch.randint(
        0, 256, (batch, model.image_channels, size, size), dtype=torch.uint8, generator=generator
    )
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    moments = torch.tensor([0.5, 0.1, 0.8], dtype=torch.float64)[:, None].expand(3, model.z_channels)
    return StepInputs(
        images=images,
        noise=noise,
        image_share=1 / batch,
        loss_scale=torch.tensor(loss_scale),
        adversarial_factor=None if factor is None else torch.tensor(factor, dtype=torch.float64),
        running_moments=moments.clone(),
    )


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by parameter name, without parameters that have none."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def relative_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all tensors together, divided by the norm of `expected`."""
    assert found.keys() == expected.keys()
    difference = torch.stack([(found[n].double() - expected[n].double()).norm() for n in expected]).norm()
    return float(difference / torch.stack([value.double().norm() for value in expected.values()]).norm())


def plain_losses(
    networks: Networks, inputs: StepInputs, loss: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the autoencoder and the discriminator, from plain formulas in one graph."""
    model, trunk = networks.autoencoder, lpips_of(networks.terms)
    images = (inputs.images.float() / 127.5 - 1).double()  # the step converts images to fp32 first
    mean, logvar = model.encoder(images).chunk(2, dim=1)
    latents = mean + (logvar / 2).exp() * inputs.noise
    recon = model.decoder(latents)
    error = recon - images

    lpips = 0
    a, b = ((x - trunk.shift) / trunk.scale for x in (recon, images))
    for index, layers in enumerate(trunk.slices):
        a, b = layers(a), layers(b)
        unit_a, unit_b = (x / (x.square().sum(1, keepdim=True) + 1e-10).sqrt() for x in (a, b))
        weight = getattr(trunk, f"linear{index}")[:, None, None]
        lpips = lpips + ((unit_a - unit_b) ** 2 * weight).sum(1).mean()

    kl = (0.5 * (mean**2 + logvar.exp() - 1 - logvar)).sum(dim=(1, 2, 3)).mean() / images[0, 0].numel()
    gap = networks.discriminator(images).detach() - networks.discriminator(recon)
    adversarial = gap.square().mean() / 2
    total = (
        loss.reconstruction_weight * error.abs().mean()
        + loss.mse_weight * error.square().mean()
        + loss.perceptual_weight * lpips
        + loss.kl_weight * kl
        + inputs.adversarial_factor * adversarial
    )
    for term in networks.terms.image:
        if term.name not in (
            "reconstruction",
            "mse",
            "perceptual",
        ):  # the tests of the others check their formulas
            total = total + term.weight * term.function(recon, images).mean()
    statistics = statistics_of(inputs.running_moments)
    for term in networks.terms.latent:
        if term.name != "kl":
            total = total + term.weight * term.function(mean, logvar, 0, statistics).mean()
    if loss.equivariance_weight and images.shape[3] == 32:  # a view of half the size; a quarter is too small
        halves = [F.avg_pool2d(latents, 2), F.avg_pool2d(images.float(), 2).double()]  # fp32, as the step
        decoded = model.decoder(halves[0])
        values = [term.weight * term.function(decoded, halves[1]).mean() for term in networks.terms.image]
        total = total + loss.equivariance_weight * sum(values)
    gap = networks.discriminator(images) - networks.discriminator(recon.detach())
    return total, (gap - 1).square().mean() / 2
