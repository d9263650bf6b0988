"""Noise of an image depends on the seed, the epoch and the image, and on nothing else."""

import pytest
import torch

from vae.ops.noise import image_noise

SHAPE = (4, 6, 5)


def noise(epochs: list[int], indices: list[int], seed: int = 0) -> torch.Tensor:
    return image_noise(torch.tensor(epochs), torch.tensor(indices), SHAPE, seed, torch.device("cpu"))


def test_noise_of_an_image_depends_only_on_its_key():
    together = noise([0, 0, 1], [5, 7, 5])
    assert torch.equal(together[1], noise([0], [7])[0])
    assert torch.equal(together[[2, 0]], noise([1, 0], [5, 5]))
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(together[0], noise([0], [5], seed=1)[0])


def test_noise_is_standard_normal_and_leaves_the_global_generator_unchanged():
    state = torch.random.get_rng_state()
    many = noise([0] * 200, list(range(200)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert many.dtype == torch.float32
    assert abs(float(many.mean())) < 0.02  # 24,000 draws: three standard errors of the mean are 0.019
    assert float(many.std()) == pytest.approx(1, abs=0.02)
