"""Mean and spread of latents over a data set, in fp64, and the scaling and shift that follow from them.

Shapes: B latents of C channels, h x w.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vae.model.autoencoder import AutoencoderKL, LatentNorm, Posterior

LEAST_VARIANCE = 1e-12


@dataclass
class LatentStatistics:
    """Of sampled latents over all images and positions; mean and std are (C,) fp64."""

    mean: torch.Tensor
    std: torch.Tensor
    count: int  # values per channel

    @property
    def shift(self) -> float:
        """Mean over all channels."""
        return self.mean.mean().item()

    @property
    def scaling(self) -> float:
        """(z - shift) * scaling has variance 1 over all channels together."""
        variance = (self.std.square() + self.mean.square()).mean() - self.mean.mean().square()
        return variance.clamp(min=LEAST_VARIANCE).item() ** -0.5


class LatentSums:
    """Sums per channel from which LatentStatistics follow."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: torch.Tensor | float = 0.0
        self._squares: torch.Tensor | float = 0.0

    def add(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        """Posteriors (B, C, h, w): a sample's mean is theirs, its mean square is mean^2 + variance."""
        mean, variance = mean.double(), logvar.double().exp()
        self.count += mean.numel() // mean.shape[1]
        self._sum = self._sum + mean.sum((0, 2, 3))
        self._squares = self._squares + (mean.square() + variance).sum((0, 2, 3))

    def statistics(self) -> LatentStatistics:
        """Of all that was added, at least one latent."""
        assert self.count, "no latents were added"
        mean = (self._sum / self.count).cpu()
        variance = (self._squares / self.count).cpu() - mean.square()
        return LatentStatistics(mean, variance.clamp(min=LEAST_VARIANCE).sqrt(), self.count)


def add_patches(sums: LatentSums, posterior: Posterior) -> None:
    """Add the 2x2 patches of latents, as LatentNorm sees them; an odd last row or column is left out."""
    height, width = (side // 2 * 2 for side in posterior.mean.shape[-2:])
    mean, logvar = (part[..., :height, :width] for part in (posterior.mean, posterior.logvar))
    sums.add(F.pixel_unshuffle(mean, 2), F.pixel_unshuffle(logvar, 2))


def is_unmeasured(norm: LatentNorm) -> bool:
    """Whether a latent norm is still the identity that a new network begins with."""
    return not norm.running_mean.any() and bool((norm.running_var == 1).all())


def set_latent_norm(model: AutoencoderKL, patches: LatentStatistics) -> None:
    """Put measured statistics of 2x2 patches into the model's latent norm."""
    model.bn.running_mean.copy_(patches.mean)
    model.bn.running_var.copy_(patches.std.square() - LatentNorm.EPS)  # normalising adds it again
