"""Mean and spread of each latent channel, as running values of earlier steps.

Statistics of the current batch would couple its images, and micro-batches would then change the gradient.

Shapes: B latents of Z channels, h x w positions.
"""

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from vae.config.options import LossConfig
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Latents

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
