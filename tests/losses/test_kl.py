"""The KL divergence equals that of PyTorch's distributions, and keeps precision in difficult cases."""

import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as reference

from vae.losses.kl import kl_divergence, kl_per_pixel


def test_equals_the_kl_of_pytorch_distributions_summed_over_the_latent():
    generator = torch.Generator().manual_seed(0)
    mean, logvar = (torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = reference(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).sum((1, 2, 3))
    found = kl_divergence(mean, logvar)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-13)


def test_is_zero_for_the_prior_and_grows_with_the_latent():
    assert kl_divergence(torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 3, 3)).tolist() == [0.0, 0.0]
    one = kl_divergence(torch.ones(1, 4, 3, 3), torch.zeros(1, 4, 3, 3))
    assert one.item() == 0.5 * 4 * 3 * 3


def test_keeps_precision_near_the_prior():
    logvar = torch.full((1, 1, 1, 1), 1e-4)
    exact = 0.5 * (1e-8 / 2 + 1e-12 / 6)
    found = kl_divergence(torch.zeros_like(logvar), logvar).item()
    assert abs(found / exact - 1) < 1e-2  # the plain formula in fp32 has an error of 100 %


def test_half_precision_does_not_overflow():
    logvar = torch.full((1, 2, 2, 2), 20.0, dtype=torch.float16)
    assert torch.isfinite(kl_divergence(torch.zeros_like(logvar), logvar)).all()


def test_gradient_matches_the_formula():
    mean = torch.full((1, 1, 1, 1), 1.5, dtype=torch.float64, requires_grad=True)
    logvar = torch.full((1, 1, 1, 1), -0.7, dtype=torch.float64, requires_grad=True)
    kl_divergence(mean, logvar).sum().backward()
    assert torch.allclose(mean.grad, mean.detach())
    assert torch.allclose(logvar.grad, 0.5 * (logvar.detach().exp() - 1))


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
