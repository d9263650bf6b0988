"""The KL divergence of the posterior from the standard normal distribution."""

import torch

from vae.config.options import LossConfig
from vae.losses.terms import TermFunction
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Latents, PerImage


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `kl_weight` (vae/losses/terms.py)."""
    return "KL", kl_per_pixel


def kl_per_pixel(mean: Latents, logvar: Latents, pixels: int, statistics: object = None) -> PerImage:
    """The KL divergence of each image, divided by the `pixels` (height times width) of the image.

    The reconstruction loss is a mean over pixels. With this unit, the ratio of both is the same for crops of
    every size. `statistics` are for other terms.
    """
    return kl_divergence(mean, logvar) / pixels


def kl_divergence(mean: Latents, logvar: Latents) -> PerImage:
    """KL(N(mean, exp(logvar)) || N(0, 1)) of each image in nats, summed over its latent.

    Kingma and Welling 2014, appendix B. Computed in fp32 at least.
    """
    assert mean.shape == logvar.shape, f"{tuple(mean.shape)} differs from {tuple(logvar.shape)}"
    dtype = accumulation_dtype(mean)  # exp() overflows fp16 above logvar 11
    mean, logvar = mean.to(dtype), logvar.to(dtype)
    # expm1(v) - v, because exp(v) - 1 - v loses digits near v = 0, and unused channels have v near 0
    return 0.5 * (mean.square() + torch.expm1(logvar) - logvar).flatten(1).sum(1)
