"""Latent statistics equal NumPy over all values at once, dead channels are found, and noise costs PSNR."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.small_vae import write_vae
from vae.evaluation.latents import (
    TAUS,
    LatentMeter,
    diffusability,
    effective_rank,
    noise_curve,
    normalise,
    rank_warning,
)
from vae.interop.vae_files import load_vae
from vae.model.autoencoder import Posterior


def gather(mean: torch.Tensor, logvar: torch.Tensor, family: str = "kl"):
    meter = LatentMeter(mean.shape[1])
    for part in range(len(mean)):
        meter.add(Posterior(mean[part : part + 1], logvar[part : part + 1]))
    config = SimpleNamespace(z_channels=mean.shape[1], has_posterior=family != "tiny")
    model = SimpleNamespace(config=config, downsampling=8)
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
    assert gather(mean, logvar, "tiny").kl_nats_per_pixel is None  # its encoder has no variance
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


def test_rank_of_the_channels():
    """Dead channels count as nothing, also with a little noise of their own."""
    white = normalise(torch.randn(200, 8, 8, 8, generator=torch.Generator().manual_seed(5)))
    assert effective_rank(white) == pytest.approx(8, rel=0.01)
    copies = white[:, :1].expand(-1, 8, -1, -1)
    assert effective_rank(copies) == pytest.approx(1)
    dead = 1e-6 * white.roll(1, 0)
    assert effective_rank(normalise(torch.cat([white, dead], 1))) == pytest.approx(8, rel=0.01)


def test_noise_curve_of_a_linear_decoder():
    """Its error is that of the noise alone: tau² times the squared sum of weights times std."""
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(3, 4, generator=generator).double() * 0.05
    latents = (
        torch.randn(8, 4, 64, 64, generator=generator).double() * torch.tensor([0.5, 1, 2, 1])[:, None, None]
    )
    noise = torch.randn(latents.shape, generator=generator).double()

    def decode(values: torch.Tensor) -> torch.Tensor:
        return torch.einsum("dc,nchw->ndhw", weights, values)

    std = latents.std((0, 2, 3), correction=0)
    curve = noise_curve(decode, latents, noise * std[:, None, None], decode(latents))
    for tau, value in list(zip(TAUS, curve.mean(1).tolist(), strict=True))[2:]:  # below, rounding counts
        mse = tau**2 * (weights * std).square().sum(1).mean().item() * 127.5**2
        assert value == pytest.approx(10 * math.log10(255**2 / mse), rel=0.02)


@pytest.mark.parametrize(("rank", "warned"), [(None, False), (5.4, False), (5.3, True)])
def test_channels_that_repeat_each_other_are_named(rank, warned):
    """Below a third of the channels."""
    assert (rank_warning("a", rank, 16) is not None) == warned


def test_every_measure_of_a_vae(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    measures = diffusability(model, images.split(4), torch.float32)
    assert list(measures) == ["effective rank", *(f"noise {tau:g} dB" for tau in TAUS)]
    assert 1 < measures["effective rank"] <= 16
    curve = [measures[f"noise {tau:g} dB"] for tau in TAUS]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > curve[-1]
    other = diffusability(model, images.split(6), torch.float32)  # batches change only the noise
    assert other["effective rank"] == pytest.approx(measures["effective rank"], rel=1e-3)


def test_latents_that_are_not_finite_have_no_measures(tmp_path):
    model = load_vae(write_vae(tmp_path / "vae")).autoencoder
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(7)).byte()
    model.decoder.conv_out.bias.data.fill_(torch.nan)
    measures = diffusability(model, images.split(4), torch.float32)
    missing = {name for name, value in measures.items() if value is None}
    assert missing == {f"noise {tau:g} dB" for tau in TAUS}
    model.encoder.conv_out.bias.data.fill_(torch.nan)
    assert diffusability(model, images.split(4), torch.float32) == {}
