"""examples/diffusion_probe.py: the velocity loss of Gaussian latents has a known minimum.

Decoded samples: the distance of images of one kind is 0, and repeated ones cover less.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.diffusion_probe import coverage, held_out_loss, image_distance, samples_of, thumbnails
from tests.harness.runs import run_script
from tests.harness.small_vae import write_vae
from vae.system.files import read_json


def white(count: int) -> Tensor:
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("variance", [1.0, 0.25])
def test_the_best_prediction_of_gaussian_latents_has_the_loss_of_theory(variance):
    """E[ε - x | x_t] is linear in x_t; its loss is (π/2) sqrt(variance)."""

    def best(x_t: Tensor, t: Tensor) -> Tensor:
        t = t[:, None, None, None]
        return (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance) * x_t

    assert samples_of(best, white(200)).std().item() == pytest.approx(variance**0.5, rel=0.05)
    latents = white(2000) * variance**0.5
    assert held_out_loss(best, latents) == pytest.approx(math.pi / 2 * variance**0.5, rel=0.02)


def photos_like(count: int, seed: int) -> torch.Tensor:
    """Smooth images with some noise, (count, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    smooth = F.interpolate(torch.randn(count, 3, 8, 8, generator=generator), size=32, mode="bicubic")
    return smooth + 0.2 * torch.randn(count, 3, 32, 32, generator=generator)


def covered(images: torch.Tensor, reference: torch.Tensor) -> float:
    return coverage(thumbnails(images), thumbnails(reference))


def test_coverage_sees_images_that_repeat_each_other_and_the_distance_does_not():
    """200 images that are 20 pictures, ten times each: what a sampler that has collapsed makes."""
    images, others = photos_like(200, 8), photos_like(200, 9)
    repeated = others[:20].repeat(10, 1, 1, 1)
    blurred = F.avg_pool2d(others, 3, 1, 1)
    assert covered(others, images) == pytest.approx(1 - 2**-5, abs=0.03)  # Naeem et al. 2020, equation 11
    assert covered(repeated, images) < 0.5
    assert image_distance(repeated, images) < image_distance(blurred, images)
    assert covered(images, images) == 1
    assert math.isnan(covered(torch.full_like(images, math.nan), images))


@pytest.mark.slow
def test_two_vaes_are_compared(image_folder, tmp_path):
    paths = [str(write_vae(tmp_path / f"{seed}/vae", seed)) for seed in (0, 1)]
    words = ["--vae", *paths, "--data", str(image_folder), "--output", str(tmp_path / "out"), "--size", "32"]
    done = run_script(
        "examples/diffusion_probe.py", *words, "--steps", "2", "--seeds", "2", "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    results = read_json(tmp_path / "out" / "results.json")
    assert list(results) == paths
    for measures in results.values():
        assert min(measures["velocity loss"]) > 1
        assert 0 < min(measures["sample distance"]) < 2
        assert 0 < measures["reconstruction distance"][0] < 2
    assert "sample distance" in done.stdout.splitlines()[-2]
    assert (tmp_path / "out" / "sample_1_0.png").exists()
