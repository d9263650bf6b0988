"""The terms of the loss mean the same at every crop size: an image that repeats has the values of one tile.

docs/training.md says what changes with the crop. Only borders differ, so the tolerances fall with the size.
"""

import functools

import pytest
import torch

from tests.harness.toy_networks import ALL_LOSSES, TERM_WEIGHTS, toy_inputs, toy_networks
from vae.config.options import LossConfig
from vae.step import compute_gradients

SIDE = 32  # px of the tile


@functools.cache
def step_sums(tiles: int, loss: LossConfig = ALL_LOSSES) -> dict[str, float]:
    """The sums of a step on one image of `tiles` x `tiles` equal tiles."""
    networks, inputs = toy_networks(torch.float32, loss=loss), toy_inputs(1, SIDE)
    smooth = torch.nn.functional.avg_pool2d(inputs.images.float(), 5, 1, 2)
    inputs.images = smooth.to(torch.uint8).tile(1, 1, tiles, tiles)
    inputs.noise = inputs.noise.tile(1, 1, tiles, tiles).float()
    result = compute_gradients(networks, inputs, [1])
    names = "reconstruction_sq_norm", "adversarial_sq_norm"
    norms = dict(zip(names, result.gradient_sq_norms, strict=True))
    return {name: float(value) for name, value in (result.losses | norms).items()}


@pytest.mark.parametrize(
    "name", ["adversarial", "discriminator", *(name.removesuffix("_weight") for name in TERM_WEIGHTS)]
)
def test_terms_do_not_change_with_the_size(name):
    small, large = step_sums(2)[name], step_sums(4)[name]
    assert large == pytest.approx(small, rel=0.15)  # a sum over pixels would be 4 times as large


def test_the_distance_of_dinov2_does_not_change_with_the_size():
    loss = LossConfig(perceptual_net="dinov2-s")
    small, large = (step_sums(tiles, loss)["perceptual"] for tiles in (4, 8))
    assert large == pytest.approx(small, rel=0.15)


def test_the_adaptive_adversarial_weight_does_not_change_with_the_size():
    def ratio(sums: dict[str, float]) -> float:
        return (sums["reconstruction_sq_norm"] / sums["adversarial_sq_norm"]) ** 0.5

    # the norms of sums over pixels in one of the two terms would be a factor of 4
    assert ratio(step_sums(4)) == pytest.approx(ratio(step_sums(2)), rel=0.3)
