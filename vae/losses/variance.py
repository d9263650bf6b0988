"""Variance expansion: the posterior's noise grows to a share of the latents' spread, instead of a KL term.

After arXiv 2603.21085, whose penalty is λ / (σ² + δ). Here σ² is divided by that of the target, so the weight
does not depend on the latents' scale, and a term linear in σ² puts the minimum at the target.
"""

from functools import partial

import torch

from vae.config.options import LossConfig
from vae.losses.latent_statistics import RunningStatistics
from vae.losses.terms import TermFunction
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Latents, PerImage

DELTA = 0.01  # in units of the target's variance: limits the gradient, which is largest there


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `variance_weight` (vae/losses/terms.py)."""
    label = f"variance expansion to {loss.variance_target:g} std"
    return label, partial(variance_expansion, target=loss.variance_target)


def variance_expansion(
    mean: Latents, logvar: Latents, pixels: int, statistics: RunningStatistics, *, target: float
) -> PerImage:
    """Mean of 1 / (ρ + δ) + ρ / (1 + δ)² over each latent, less its minimum; ρ = σ² / (target std)².

    0 if every σ is at the target. A value that the decoder reads at a gain J settles below it: a squared
    error J² σ² and a small weight λ balance at σ = (λ target² std² / J²)^(1/4).
    """
    variance = logvar.to(accumulation_dtype(logvar)).exp()
    ratio = variance / (target * statistics.std).square()
    value = 1 / (ratio + DELTA) + ratio / (1 + DELTA) ** 2
    least = 1 / (1 + DELTA) + 1 / (1 + DELTA) ** 2
    return (value - least).flatten(1).mean(1)
