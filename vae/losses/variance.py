"""Variance expansion: the posterior's noise grows to a share of the latents' spread, instead of a KL term.

After arXiv 2603.21085, whose penalty is λ / (σ² + δ). Here σ² is divided by that of the target, so the weight
does not depend on the latents' scale, and a term linear in σ² puts the minimum at the target.

The spread of each latent channel is a running value of earlier steps: statistics of the current batch would
couple its images, and micro-batches would then change the gradient. Shapes: Z latent channels.
"""

from dataclasses import fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vae.config.options import LossConfig
from vae.losses.terms import TermFunction
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Latents, PerImage

MIN_STD_SHARE = 1e-3  # of the strongest channel: a dead channel is not enlarged


class RunningStatistics(NamedTuple):
    """Mean and standard deviation of the posterior's mean in each channel, (Z, 1, 1) each."""

    mean: Tensor
    std: Tensor


def needs_statistics(loss: LossConfig) -> bool:
    """Whether a term with a weight reads the running values."""
    return any(getattr(loss, item.name) for item in fields(loss) if item.metadata.get("statistics"))


def moments(mean: Latents) -> Tensor:
    """1, mean and mean square of each channel over the positions of each latent: (B, 3, Z)."""
    values = mean.detach().to(accumulation_dtype(mean)).flatten(2)
    first = values.mean(2)
    return torch.stack([torch.ones_like(first), first, values.square().mean(2)], dim=1)


def statistics_of(running: Tensor) -> RunningStatistics:
    """The statistics from running means of `moments` that began at 0, (3, Z); mean 0 and std 1 at first.

    The running mean of ones corrects the start from 0.
    """
    count, total, squares = running
    known = count > 0
    weight = torch.where(known, count, 1)
    mean = total / weight
    std = (squares / weight - mean.square()).clamp(min=0).sqrt()
    std = torch.where(known, std.clamp(min=MIN_STD_SHARE * std.amax()), 1)
    return RunningStatistics(mean[:, None, None], std[:, None, None])


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
    minimum = 1 / (1 + DELTA) + 1 / (1 + DELTA) ** 2
    return (value - minimum).flatten(1).mean(1)
