"""Neighbouring latent vectors become similar, up to a limit (arXiv 2512.05394).

The channels are normalised by running values of earlier steps; those of the batch would couple its images.
"""

import torch
from torch.nn import functional as F

from vae.config.options import LossConfig
from vae.losses.latent_statistics import LatentStatistics
from vae.losses.terms import TermFunction
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Latents, PerImage

LIMIT = 0.75  # the paper's: a higher correlation is not rewarded
WINDOW = 2  # positions along a side
EPS = 1e-6


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `local_correlation_weight` (vae/losses/terms.py)."""
    return "local correlation", missing_correlation


def missing_correlation(
    mean: Latents, logvar: Latents, pixels: int, statistics: LatentStatistics
) -> PerImage:
    """max(0, LIMIT - r) of each latent; r: mean correlation of the pairs within 2 x 2 windows."""
    values = (mean.to(accumulation_dtype(mean)) - statistics.mean) / statistics.std
    units = F.normalize(values - values.mean(1, keepdim=True), dim=1, eps=EPS)
    # n unit vectors with the mean m: n² |m|² = n + the sum over the n (n - 1) pairs
    count = WINDOW * WINDOW
    squares = F.avg_pool2d(units, WINDOW, stride=1).square().sum(1)  # (B, h - 1, w - 1)
    correlation = (count * squares - 1) / (count - 1)
    return F.relu(LIMIT - correlation.flatten(1).mean(1))
