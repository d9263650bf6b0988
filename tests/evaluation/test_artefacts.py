"""Probes on networks with known results: equivariant, not equivariant, and with a known pattern."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vae.config.options import ModelConfig
from vae.evaluation.artefacts import SCALES, TURNS, equivariance, grid_artefacts, periodic_part
from vae.model.autoencoder import Posterior


class Averaging(nn.Module):
    """An autoencoder that averages 4x4 pixels and repeats them; it commutes with turns."""

    downsampling = 4
    config = ModelConfig(channels=(8, 8, 8))  # the check of main memory reads the channels

    def __init__(self, pattern: torch.Tensor | None = None):
        super().__init__()
        self.pattern = pattern  # (4, 4), added to every 4x4 block of the decoded image
        self.place = nn.Parameter(torch.zeros(()))

    def encode(self, images):
        mean = F.avg_pool2d(images, 4)
        return Posterior(mean, torch.full_like(mean, -30.0))

    def decode(self, latents):
        images = latents.repeat_interleave(4, 2).repeat_interleave(4, 3)
        if self.pattern is None:
            return images
        return images + self.pattern.repeat(latents.shape[2], latents.shape[3])


def images(height: int, width: int) -> torch.Tensor:
    coarse = torch.rand((2, 3, 5, 5), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return F.interpolate(coarse, size=(height, width), mode="bilinear")


def test_equivariant_network_loses_nothing():
    found = equivariance(Averaging(), [images(32, 48)], torch.float32)
    assert set(found) == {*TURNS, *SCALES}
    for name in TURNS:
        assert math.isclose(found[name].latents, found[name].images, rel_tol=1e-9)
    for name in SCALES:  # area-averaged bicubic only approximately commutes with averaging
        assert abs(found[name].latents - found[name].images) < 3


def test_decoder_with_a_directional_pattern_loses_by_turns():
    ramp = torch.linspace(-0.4, 0.4, 4).view(4, 1).expand(4, 4)
    vertical = images(1, 1).expand(2, 3, 32, 32) * 0.5 + ramp.repeat(8, 8)
    found = equivariance(Averaging(ramp), [vertical], torch.float32)
    assert found["turn_90"].latents < 20  # the decoder's ramp is still vertical, the image's is not
    truth = vertical.rot90(1, (2, 3))
    recon = Averaging(ramp).decode(F.avg_pool2d(vertical, 4).rot90(1, (2, 3)))
    levels = ((recon - truth).clamp(-2, 2) * 127.5).square().mean((1, 2, 3))
    expected = (10 * torch.log10(255**2 / levels)).mean().item()
    assert math.isclose(found["turn_90"].latents, expected, abs_tol=0.1)  # psnr rounds to 8 bit


def test_images_smaller_than_one_latent_pixel_are_skipped():
    assert equivariance(Averaging(), [torch.zeros(1, 3, 3, 40)], torch.float32) == {}


def test_periodic_part_equals_the_added_pattern():
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn((3, 8, 8), generator=generator, dtype=torch.float64)
    noise = torch.randn((3, 64, 64), generator=generator, dtype=torch.float64)
    noise = noise - noise.view(3, 8, 8, 8, 8).mean((1, 3)).repeat(1, 8, 8)  # it contains no periodic part
    found = periodic_part((pattern.repeat(1, 8, 8) + noise) / 127.5, 8)
    centred = pattern - pattern.mean((1, 2), keepdim=True)
    expected = centred.square().mean().sqrt().item()
    assert math.isclose(found.levels, expected, rel_tol=1e-9)
    total = centred.square().mean() + noise.square().mean()
    assert math.isclose(found.share, (centred.square().mean() / total).item(), rel_tol=1e-9)


def test_constant_reconstruction_has_no_grid():
    found = grid_artefacts(Averaging(), torch.float32)
    assert {one.levels for one in found.values()} == {0.0}
    assert {one.share for one in found.values()} == {None}


@pytest.mark.parametrize("colour", ["grey", "red"])
def test_grid_pattern_of_the_decoder_is_measured(colour):
    pattern = torch.zeros(4, 4)
    pattern[0, 0] = 0.16
    found = grid_artefacts(Averaging(pattern), torch.float32)[colour]
    expected = 0.16 * 127.5 * math.sqrt(1 / 16 - 1 / 256)
    assert math.isclose(found.levels, expected, rel_tol=1e-5)
    assert math.isclose(found.share, 1.0, rel_tol=1e-6)
