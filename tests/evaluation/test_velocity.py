"""The velocity loss of Gaussian latents has a known minimum, and a trained network comes near it."""

import math

import pytest
import torch
from torch import Tensor

from vae.evaluation.velocity import VelocityNetwork, held_out_loss, is_held_out, train, trained_networks


def white(count: int) -> Tensor:
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("variance", [1.0, 0.25])
def test_the_best_prediction_of_gaussian_latents_has_the_loss_of_theory(variance):
    """E[ε - x | x_t] is linear in x_t; its loss is (π/2) sqrt(variance)."""

    def best(x_t: Tensor, t: Tensor) -> Tensor:
        t = t[:, None, None, None]
        return (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance) * x_t

    latents = white(2000) * variance**0.5
    assert held_out_loss(best, latents) == pytest.approx(math.pi / 2 * variance**0.5, rel=0.02)


def test_network_has_about_a_million_weights():
    assert 0.9e6 < sum(weight.numel() for weight in VelocityNetwork(16).parameters()) < 1.2e6


def test_same_seed_gives_the_same_network():
    latents = white(8)
    first, again, other = (train(latents, seed, 2, lambda: None) for seed in (1, 1, 2))
    state = [
        torch.cat([weight.flatten() for weight in network.parameters()]) for network in (first, again, other)
    ]
    assert torch.equal(state[0], state[1])
    assert not torch.equal(state[0], state[2])


@pytest.mark.slow
def test_smooth_latents_are_easier_than_white_noise():
    noise = white(400)
    smooth = torch.nn.functional.avg_pool2d(noise, 3, 1, 1)
    smooth = smooth / smooth.std()
    hard, easy = (
        held_out_loss(*trained_networks(latents, 1, 40), latents[is_held_out(len(latents))])
        for latents in (noise, smooth)
    )
    assert math.pi / 2 * 0.97 < hard < 2.1  # no network beats theory on noise
    assert easy < 0.95 * hard
