"""The judges of benchmarks/diffusability.py: sampler, distance of patches, rank correlation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.diffusability import parts_of, patch_distance, samples_of, spearman


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


def test_rank_correlation_with_ties():
    a, b = np.array([1.0, 2.0, 2.0, 4.0]), np.array([10.0, 30.0, 20.0, 40.0])
    assert spearman(a, a**3) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert spearman(a, b) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)  # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4


def test_held_out_crops_share_no_pixel_with_those_for_training():
    photo = torch.arange(12).expand(3, 2, 12)
    (left,), (right,) = parts_of([photo])
    assert left.tolist()[0][0] == list(range(10))
    assert right.tolist()[0][0] == [10, 11]
