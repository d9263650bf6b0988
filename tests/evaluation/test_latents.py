"""Latent statistics equal NumPy over all values at once, and dead channels are found."""

from types import SimpleNamespace

import numpy as np
import torch

from vae.evaluation.latents import LatentMeter
from vae.model.autoencoder import Posterior


def gather(mean: torch.Tensor, logvar: torch.Tensor):
    meter = LatentMeter(mean.shape[1])
    for part in range(len(mean)):
        meter.add(Posterior(mean[part : part + 1], logvar[part : part + 1]))
    model = SimpleNamespace(config=SimpleNamespace(z_channels=mean.shape[1]), downsampling=8)
    return meter.facts(model)


def posteriors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn((5, 4, 6, 7), generator=generator) * 3 + 2
    return mean, torch.randn(mean.shape, generator=generator) - 4


def test_statistics_equal_numpy():
    mean, logvar = posteriors()
    facts = gather(mean, logvar)
    m, v = mean.double().numpy(), np.exp(logvar.double().numpy())
    assert np.allclose(facts.mean, m.mean((0, 2, 3)), rtol=1e-12)
    assert np.allclose(facts.std, np.sqrt(m.var((0, 2, 3)) + v.mean((0, 2, 3))), rtol=1e-10)
    kl = 0.5 * (m**2 + v - 1 - np.log(v)).sum((1, 2, 3)).mean() / (6 * 7 * 8 * 8)
    assert np.isclose(facts.kl_nats_per_pixel, kl, rtol=1e-10)
    ratio = np.exp(np.log(v).mean((0, 2, 3)) / 2) / m.std((0, 2, 3))
    assert np.isclose(facts.sigma_over_std, np.sort(ratio)[1], rtol=1e-10)  # torch: the lower of two medians
    assert (facts.dead_channels, facts.dead_share) == ([], 0.0)


def test_noise_and_constant_channels_are_dead_at_any_scale():
    mean, logvar = posteriors()
    mean[:, 1] = 0.01 * mean[:, 1]  # hidden by its own noise
    logvar[:, 1] = 0.0
    mean[:, 3] = 5 + 1e-4 * mean[:, 3]  # the same for every image
    logvar[:, 3] = -30.0
    for scale in (1.0, 0.01):
        facts = gather(mean * scale, logvar + 2 * np.log(scale))
        assert facts.dead_channels == [1, 3]
        assert facts.dead_share == 0.5
