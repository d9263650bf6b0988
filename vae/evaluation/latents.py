"""Latents over a set of images: statistics, KL divergence, and dead channels.

Shapes: B latents of C channels, h x w.
"""

import torch

from vae.evaluation.results import LatentFacts
from vae.interop.latent_statistics import LatentSums
from vae.losses.kl import kl_divergence
from vae.model.autoencoder import AutoencoderKL, Posterior

# A channel is dead if the variance of the posterior's mean is less than 1 % of the variance of samples (the
# noise hides the image), or if the mean's standard deviation is at most a thousandth of that of the strongest
# channel. Unlike a fixed variance (Burda et al. 2016: 0.01), both limits do not depend on the latent's scale.
MIN_SIGNAL_SHARE = 0.01
MIN_STD_SHARE = 1e-3


class LatentMeter:
    """Accumulates statistics of posteriors of images of any size, in fp64."""

    def __init__(self) -> None:
        self._sampled = LatentSums()
        self._means = LatentSums()  # only the posteriors' means
        self._kl = torch.zeros((), dtype=torch.float64)
        self._images = 0

    def add(self, posterior: Posterior) -> None:
        """Add posteriors (B, C, h, w)."""
        mean, logvar = posterior.mean, posterior.logvar
        self._sampled.add(mean, logvar)
        self._means.add(mean, torch.full_like(logvar, -torch.inf))
        self._kl += kl_divergence(mean.double(), logvar.double()).sum().cpu()
        self._images += len(mean)

    def facts(self, model: AutoencoderKL) -> LatentFacts | None:
        """Facts about all latents of `model` that were added; None if there were none."""
        if self._images == 0:
            return None
        sampled, means = self._sampled.statistics(), self._means.statistics()
        signal = means.std.square()
        dead = signal < MIN_SIGNAL_SHARE * sampled.std.square()
        dead |= means.std <= MIN_STD_SHARE * means.std.max()
        return LatentFacts(
            channels=model.config.z_channels,
            downsampling=model.downsampling,
            mean=sampled.mean.tolist(),
            std=sampled.std.tolist(),
            kl_nats=(self._kl / self._images).item(),
            dead_channels=dead.nonzero().flatten().tolist(),
            dead_share=dead.double().mean().item(),
        )
