"""Latents over a set of images: statistics, KL divergence, posterior noise, and dead channels.

Shapes: B latents of C channels, h x w.
"""

import torch

from vae.evaluation.results import LatentFacts
from vae.evaluation.sums import Sums
from vae.interop.latent_statistics import MIN_VARIANCE, LatentSums
from vae.losses.kl import kl_divergence
from vae.losses.latent_statistics import MIN_STD_SHARE
from vae.model.autoencoder import AutoencoderKL, Posterior

# A channel is dead if the variance of the posterior's mean is less than 1 % of the variance of samples (the
# noise hides the image), or if the mean's standard deviation is at most a thousandth of that of the strongest
# channel. Unlike a fixed variance (Burda et al. 2016: 0.01), both limits do not depend on the latent's scale.
MIN_SIGNAL_SHARE = 0.01
LATENTS = "latents "  # the names of the sums of a NoiseMeter begin with it


class NoiseMeter:
    """The posterior's noise beside the spread of the latents, from sums of processes.

    The sums are per channel, in fp64 and on the device, so that no batch waits for the host.
    """

    def __init__(self, channels: int) -> None:
        self._sums = torch.zeros(3, channels, dtype=torch.float64)  # of mean, mean squared and log sigma
        self._count = 0  # values per channel

    def add(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        """Add posteriors (B, C, h, w)."""
        means = mean.double()
        log_sigma = 0.5 * logvar.double()
        sums = [part.sum((0, 2, 3)) for part in (means, means.square(), log_sigma)]
        self._sums = self._sums.to(mean.device) + torch.stack(sums)
        self._count += mean.numel() // mean.shape[1]

    def sums(self) -> Sums:
        """The sums by name, in their order; the names do not depend on what was added."""
        values = self._sums.flatten().tolist()
        return {f"{LATENTS}{index:04}": (value, self._count) for index, value in enumerate(values)}


class LatentMeter:
    """Accumulates statistics of posteriors of `channels` and images of any size, in fp64."""

    def __init__(self, channels: int) -> None:
        self._sampled = LatentSums()
        self._noise = NoiseMeter(channels)
        self._kl = torch.zeros((), dtype=torch.float64)  # nats per position, summed over images
        self._images = 0

    def add(self, posterior: Posterior) -> None:
        """Add posteriors (B, C, h, w)."""
        mean, logvar = posterior.mean, posterior.logvar
        self._sampled.add(mean, logvar)
        self._noise.add(mean, logvar)
        positions = mean[0, 0].numel()
        self._kl += kl_divergence(mean.double(), logvar.double()).sum().cpu() / positions
        self._images += len(mean)

    def facts(self, model: AutoencoderKL) -> LatentFacts | None:
        """Facts about all latents of `model` that were added; None if there were none."""
        if self._images == 0:
            return None
        sampled = self._sampled.statistics()
        std, log_sigma = channel_facts(self._noise.sums())
        dead = std.square() < MIN_SIGNAL_SHARE * sampled.std.square()
        dead |= std <= MIN_STD_SHARE * std.max()
        return LatentFacts(
            channels=model.config.z_channels,
            downsampling=model.downsampling,
            mean=sampled.mean.tolist(),
            std=sampled.std.tolist(),
            kl_nats_per_pixel=(self._kl / self._images).item() / model.downsampling**2,
            sigma_over_std=_sigma_over_std(log_sigma, std),
            dead_channels=dead.nonzero().flatten().tolist(),
            dead_share=dead.double().mean().item(),
        )


def noise_facts(sums: Sums) -> dict[str, float]:
    """`latent_std` and `sigma_over_std` from the sums of a NoiseMeter; nothing if none were added.

    latent_std: standard deviation of the posterior's means, root mean square over the channels.
    """
    if not all(count for _, count in sums.values()):
        return {}
    std, log_sigma = channel_facts(sums)
    return {
        "latent_std": std.square().mean().sqrt().item(),
        "sigma_over_std": _sigma_over_std(log_sigma, std),
    }


def channel_facts(sums: Sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard deviation of the means, and mean of log sigma, of each channel: (C,) in fp64."""
    means = torch.tensor([value / count for _, (value, count) in sorted(sums.items())], dtype=torch.float64)
    mean, square, log_sigma = means.view(3, -1)
    return (square - mean.square()).clamp(min=MIN_VARIANCE).sqrt(), log_sigma


def _sigma_over_std(log_sigma: torch.Tensor, std: torch.Tensor) -> float:
    """The posterior's sigma over the standard deviation of its means, as a median over the channels.

    `log_sigma` is the mean of log sigma, so that sigma is a geometric mean, and `std` the standard deviation
    of the means, of each channel (C,).
    """
    return (log_sigma.exp() / std).median().item()
