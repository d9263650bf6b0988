"""What latents look like over a set of images: statistics, KL, channels that carry nothing.

Shapes: B latents of C channels, h x w.
"""

import torch

from vae.evaluation.results import LatentFacts
from vae.interop.latent_statistics import LatentSums
from vae.losses.kl import kl_divergence
from vae.model.autoencoder import AutoencoderKL, Posterior

# A channel is dead where the posterior's mean makes less than 1 % of the variance of what is sampled (its
# noise drowns the image), or varies less than a thousandth of the strongest channel's. Unlike a fixed
# variance (Burda et al. 2016: 0.01), both hold at any scale of the latent.
LEAST_SIGNAL_SHARE = 0.01
LEAST_DEVIATION_SHARE = 1e-3


class LatentMeter:
    """Gathers posteriors of images of any size, in fp64."""

    def __init__(self) -> None:
        self._sampled = LatentSums()
        self._means = LatentSums()  # of the posteriors' means alone
        self._kl = torch.zeros((), dtype=torch.float64)
        self._images = 0

    def add(self, posterior: Posterior) -> None:
        """Take in posteriors (B, C, h, w)."""
        mean, logvar = posterior.mean, posterior.logvar
        self._sampled.add(mean, logvar)
        self._means.add(mean, torch.full_like(logvar, -torch.inf))
        self._kl += kl_divergence(mean.double(), logvar.double()).sum().cpu()
        self._images += len(mean)

    def facts(self, model: AutoencoderKL) -> LatentFacts | None:
        """Of everything added, latents of `model`; None: nothing was."""
        if self._images == 0:
            return None
        sampled, means = self._sampled.statistics(), self._means.statistics()
        signal = means.std.square()
        dead = signal < LEAST_SIGNAL_SHARE * sampled.std.square()
        dead |= means.std <= LEAST_DEVIATION_SHARE * means.std.max()
        return LatentFacts(
            channels=model.config.z_channels,
            downsampling=model.downsampling,
            mean=sampled.mean.tolist(),
            std=sampled.std.tolist(),
            kl_nats=(self._kl / self._images).item(),
            dead_channels=dead.nonzero().flatten().tolist(),
            dead_share=dead.double().mean().item(),
        )
