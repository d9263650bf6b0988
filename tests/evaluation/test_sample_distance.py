"""The sampler reaches a known distribution, and the distance of patches sees what is lost."""

import pytest
import torch
import torch.nn.functional as F

from vae.evaluation.sample_distance import patch_distance, samples_of


def test_samples_of_the_best_velocity_have_the_variance_of_the_latents():
    variance = 0.25

    def best(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = t[:, None, None, None]
        return (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance) * x_t

    noise = torch.randn(200, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    assert samples_of(best, noise).std().item() == pytest.approx(0.5, rel=0.05)


def test_distance_grows_with_blur_and_with_lost_contrast():
    images = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    others = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    same = patch_distance(others, images)
    assert patch_distance(images, images) == 0
    blurred = [patch_distance(F.avg_pool2d(others, size, 1, size // 2), images) for size in (3, 5)]
    assert 2 * same < blurred[0] < blurred[1]
    assert patch_distance(0.8 * others, images) > 2 * same


def test_images_smaller_than_a_patch_at_quarter_size_are_compared_at_the_others():
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    assert patch_distance(images.flip(0) + 0.1, images) > 0


def test_distance_from_blank_images_is_finite():
    blank = torch.zeros(4, 3, 32, 32)
    assert patch_distance(blank, blank) == 0
    assert 0 < patch_distance(blank + 0.5, blank) < 1e3
