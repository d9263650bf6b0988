"""Mean and standard deviation of latents over a data set, in fp64, and the resulting constants of a VAE.

Shapes: B latents of C channels, h x w.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vae.model.autoencoder import AutoencoderKL, LatentNorm, Posterior

MIN_VARIANCE = 1e-12


class LatentConstants(NamedTuple):
    """What programs normalise latents z with: (z - shift) * scaling, or per channel (z - mean) / std."""

    scaling: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] = ()  # of each channel; empty: not known
    std: tuple[float, ...] = ()


@dataclass
class LatentStatistics:
    """Statistics of sampled latents over all images and positions; mean and std are (C,) fp64."""

    mean: torch.Tensor
    std: torch.Tensor
    count: int  # values per channel

    @property
    def shift(self) -> float:
        """Mean over all channels."""
        return self.mean.mean().item()

    @property
    def scaling(self) -> float:
        """The factor for which (z - shift) * scaling has variance 1 over all channels together."""
        variance = (self.std.square() + self.mean.square()).mean() - self.mean.mean().square()
        return variance.clamp(min=MIN_VARIANCE).item() ** -0.5

    @property
    def constants(self) -> LatentConstants:
        """All constants."""
        return LatentConstants(self.scaling, self.shift, tuple(self.mean.tolist()), tuple(self.std.tolist()))

    def folded(self, multiply: torch.Tensor, add: torch.Tensor) -> "LatentStatistics":
        """Those of the latents z * multiply + add; both are (C,)."""
        return LatentStatistics(self.mean * multiply + add, self.std * multiply, self.count)


class LatentSums:
    """Sums per channel, from which LatentStatistics are computed."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        """Add posteriors (B, C, h, w); the mean square of their samples is mean^2 + variance."""
        mean, variance = mean.double(), logvar.double().exp()
        self.count += mean.numel() // mean.shape[1]
        self._sum = self._sum + mean.sum((0, 2, 3))
        self._squares = self._squares + (mean.square() + variance).sum((0, 2, 3))

    def statistics(self) -> LatentStatistics:
        """Statistics of all added latents; at least one is required."""
        assert self.count, "no latents were added"
        mean = (self._sum / self.count).cpu()
        variance = (self._squares / self.count).cpu() - mean.square()
        return LatentStatistics(mean, variance.clamp(min=MIN_VARIANCE).sqrt(), self.count)


def sums_of(posteriors: Iterable[Posterior], norm: LatentNorm | None) -> tuple[LatentSums, LatentSums]:
    """The sums of latents, and those of the patches that `norm` normalizes, if there is one.

    A last row or column beyond the patches is excluded.
    """
    latents = LatentSums()
    patches = LatentSums()
    for posterior in posteriors:
        latents.add(posterior.mean, posterior.logvar)
        if norm is not None:
            height, width = (side // norm.patch * norm.patch for side in posterior.mean.shape[-2:])
            mean, logvar = (part[..., :height, :width] for part in (posterior.mean, posterior.logvar))
            patches.add(F.pixel_unshuffle(mean, norm.patch), F.pixel_unshuffle(logvar, norm.patch))
    return latents, patches


def is_unmeasured(norm: LatentNorm, encoder_trained: bool = False) -> bool:
    """Whether a latent norm is still the identity of a new network.

    `encoder_trained`: the latents have changed. Statistics of single positions are then those of other
    latents; FLUX.2's are a fixed part of its network.
    """
    if encoder_trained and norm.patch == 1:
        return True
    return not norm.running_mean.any() and bool((norm.running_var == 1).all())


def set_latent_norm(model: AutoencoderKL, patches: LatentStatistics) -> None:
    """Copy measured statistics of patches into the model's latent norm."""
    assert model.bn is not None
    model.bn.running_mean.copy_(patches.mean)
    model.bn.running_var.copy_(patches.std.square() - model.bn.eps)  # normalize() adds it again
