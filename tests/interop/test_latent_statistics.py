"""Latent statistics equal those of samples, per channel and over all channels."""

import pytest
import torch

from vae.interop.latent_statistics import LatentStatistics, LatentSums, sums_of
from vae.model.autoencoder import LatentNorm, Posterior


def posteriors(count: int, channels: int = 3) -> list[Posterior]:
    generator = torch.Generator().manual_seed(0)
    offset = torch.tensor([5.0, -2.0, 0.1])[:, None, None]
    size = torch.tensor([0.1, 3.0, 1.0])[:, None, None]
    return [
        Posterior(
            torch.randn(2, channels, 6, 4, generator=generator) * size + offset,
            torch.randn(2, channels, 6, 4, generator=generator) - 2,
        )
        for _ in range(count)
    ]


def statistics_of(parts) -> LatentStatistics:
    latents, _ = sums_of(parts, None)
    return latents.statistics()


def test_statistics_match_many_samples():
    parts = posteriors(4)
    found = statistics_of(parts)
    generator = torch.Generator().manual_seed(1)
    samples = torch.cat(
        [p.sample(torch.randn(p.mean.shape, generator=generator)) for p in parts for _ in range(500)]
    )
    assert torch.allclose(found.mean, samples.mean((0, 2, 3)).double(), atol=0.01)
    assert torch.allclose(found.std, samples.std((0, 2, 3)).double(), rtol=0.01)
    assert found.shift == pytest.approx(samples.mean().item(), abs=0.01)
    assert found.scaling == pytest.approx(1 / samples.std().item(), rel=0.01)


def test_statistics_do_not_depend_on_batching():
    parts = posteriors(4)
    whole = Posterior(torch.cat([p.mean for p in parts]), torch.cat([p.logvar for p in parts]))
    one, other = statistics_of(parts), statistics_of([whole])
    assert torch.allclose(one.mean, other.mean, rtol=1e-12)
    assert torch.allclose(one.std, other.std, rtol=1e-12)
    assert one.count == other.count == 4 * 2 * 6 * 4


def test_large_mean_does_not_hide_small_std():
    generator = torch.Generator().manual_seed(0)
    mean = 1000 + 0.01 * torch.randn(1, 1, 100, 100, generator=generator, dtype=torch.float64)
    sums = LatentSums()
    sums.add(mean, torch.full_like(mean, -30.0))
    assert sums.statistics().std.item() == pytest.approx(
        0.01, rel=0.02
    )  # fp32 sums would give only rounding noise


def test_patches_exclude_an_odd_border():
    part = Posterior(torch.randn(1, 2, 5, 7), torch.zeros(1, 2, 5, 7))
    _, patches = sums_of([part], LatentNorm(2, patch=2))
    found = patches.statistics()
    assert found.count == 2 * 3
    corner = part.mean[:, 0, 0:4:2, 1:6:2]  # channel 0, row 0, column 1 of each patch
    assert found.mean[1].item() == pytest.approx(corner.mean().item(), abs=1e-6)
