"""The terms of the latents: their formulas, their minimum, and what they may not depend on."""

import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as reference
from torch.nn import functional as F

from vae.losses.equivariance import smaller
from vae.losses.kl import kl_divergence, kl_per_pixel
from vae.losses.variance import DELTA, RunningStatistics, moments, statistics_of, variance_expansion

ONE = torch.ones((), dtype=torch.float64)
UNIT = RunningStatistics(0 * ONE, ONE)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_statistics_are_those_of_the_latents_from_the_first_step_on():
    latents = normal(6, 3, 5, 4) * torch.tensor([0.1, 2.0, 30.0])[:, None, None] + 1
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3), correction=0)
    for steps in (1, 7):
        running = torch.zeros(3, 3, dtype=torch.float64)
        for _ in range(steps):
            running = running.lerp(moments(latents).mean(0), 0.01)
        found = statistics_of(running)
        torch.testing.assert_close(found.mean.flatten(), mean)
        torch.testing.assert_close(found.std.flatten(), std)
    unknown = statistics_of(torch.zeros(3, 3))
    assert unknown.mean.unique().tolist() == [0]
    assert unknown.std.unique().tolist() == [1]


def test_a_dead_channel_is_not_enlarged():
    latents = normal(2, 2, 4, 4) * torch.tensor([1.0, 0.0])[:, None, None]
    std = statistics_of(moments(latents).mean(0)).std.flatten()
    assert float(std[1]) == pytest.approx(1e-3 * float(std[0]))


def test_variance_expansion_is_zero_at_its_target_and_positive_elsewhere():
    statistics = RunningStatistics(0 * ONE, torch.tensor([2.0, 0.5])[:, None, None])
    sigma = 0.3 * statistics.std.expand(1, 2, 3, 3)
    found = [
        variance_expansion(sigma, 2 * (factor * sigma).log(), 0, statistics, target=0.3).item()
        for factor in (0.2, 0.9, 1.0, 1.1, 3.0)
    ]
    assert found[2] == pytest.approx(0, abs=1e-9)
    assert found[0] > found[1] > found[2] < found[3] < found[4]


@pytest.mark.parametrize("gain", [0.0, 3.0, 10.0])
def test_variance_expansion_balances_a_linear_decoder_as_its_formula_says(gain):
    """λ / (ρ + δ)² = λ / (1 + δ)² + J² target²: without a gain, the target; else about the docstring's."""
    weight, target = 1e-2, 0.5
    logvar = torch.full((1, 1, 1, 1), -3.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logvar], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        error = gain**2 * logvar.exp().mean()
        value = error + weight * variance_expansion(logvar, logvar, 0, UNIT, target=target).mean()
        value.backward()
        return value

    optimizer.step(loss)
    sigma = float((0.5 * logvar.detach()).exp())
    ratio = (weight / (weight / (1 + DELTA) ** 2 + gain**2 * target**2)) ** 0.5 - DELTA
    assert sigma == pytest.approx(target * ratio**0.5, rel=0.02)
    if gain == 3.0:
        assert sigma == pytest.approx((weight * target**2 / gain**2) ** 0.25, rel=0.08)


@pytest.mark.parametrize("side", [64, 128, 256])  # positions: images of 512 to 2048 px
def test_no_latent_term_grows_with_the_area_or_the_batch(side):
    one, many = normal(1, 8, 64, 64), normal(3, 8, side, side, seed=1)
    expected = variance_expansion(one, 0.3 * one - 2, 64 * 64 * 64, UNIT, target=0.2)
    found = variance_expansion(many, 0.3 * many - 2, 64 * side * side, UNIT, target=0.2)
    assert found.shape == (3,)
    torch.testing.assert_close(found, expected.expand(3), rtol=0.03, atol=0)  # other random values


def test_views_are_area_means():
    images = normal(4, 3, 72, 72)
    half, quarter = smaller(images, 8, 8)  # 9 positions: 4 and 2 of them are whole
    assert torch.equal(half, F.avg_pool2d(images[..., :64, :64], 2))
    assert quarter.shape == (4, 3, 16, 16)
    latents = smaller(normal(4, 2, 9, 9), 1, 8)
    assert [view.shape[2:] for view in latents] == [(4, 4), (2, 2)]
    assert len(smaller(normal(1, 2, 6, 6), 1, 8)) == 1  # a quarter has 8 px
    (wide,) = smaller(normal(2, 3, 32, 48), 8, 8)
    assert wide.shape == (2, 3, 16, 24)


def test_equals_the_kl_of_pytorch_distributions_summed_over_the_latent():
    generator = torch.Generator().manual_seed(0)
    mean, logvar = (torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = reference(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).sum((1, 2, 3))
    found = kl_divergence(mean, logvar)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-13)


def test_is_zero_for_the_prior_and_grows_with_the_latent():
    zeros, ones = torch.zeros(2, 4, 3, 3), torch.ones(2, 4, 3, 3)
    assert kl_divergence(zeros, zeros).tolist() == [0.0, 0.0]
    assert kl_divergence(ones, zeros).tolist() == [0.5 * 4 * 3 * 3] * 2
    assert torch.isfinite(kl_divergence(zeros.half(), 20 * ones.half())).all()


def test_keeps_precision_near_the_prior():
    logvar = torch.full((1, 1, 1, 1), 1e-4)
    exact = 0.5 * (1e-8 / 2 + 1e-12 / 6)
    found = kl_divergence(torch.zeros_like(logvar), logvar).item()
    assert abs(found / exact - 1) < 1e-2  # the plain formula in fp32 has an error of 100 %


def test_kl_per_pixel_does_not_depend_on_the_size_of_the_image():
    generator = torch.Generator().manual_seed(0)
    mean, logvar = torch.randn(2, 1, 16, 8, 8, generator=generator)  # of 64 px
    found = []
    for size in (64, 512, 2048):
        tiles = size // 64
        parts = (part.tile(1, 1, tiles, tiles) for part in (mean, logvar))
        found.append(kl_per_pixel(*parts, size**2).item())
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
    assert found[0] == pytest.approx(kl_divergence(mean, logvar).item() / 4096)
