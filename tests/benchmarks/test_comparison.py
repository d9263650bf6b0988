"""Both sides of the comparison do the same work, counts follow CUDA's rules, and reports are correct."""

import pytest
import torch

from benchmarks.comparison import operations
from benchmarks.comparison import theirs as other_side
from benchmarks.comparison.ours import Work
from benchmarks.comparison.theirs import BF16, DifferentWorkError, Theirs, check_same_work
from vae.config.model_options import ModelConfig

CPU, META = torch.device("cpu"), torch.device("meta")
TOY = ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, z_channels=4, init="default")
TOY_WORK = Work(32, batch=2, model=TOY)


def test_both_sides_do_the_same_work():
    found = check_same_work(CPU, TOY_WORK)["relative_differences"]
    assert {"reconstructions", "gradients", "perceptual losses", "kl losses"} <= set(found)
    assert max(found.values()) < 1e-6


def test_different_work_is_an_error(monkeypatch):
    monkeypatch.setattr(other_side, "PERCEPTUAL_SCALE", 0.51)
    with pytest.raises(DifferentWorkError, match="gradients differ by"):
        check_same_work(CPU, TOY_WORK)


def test_both_sides_decode_the_same_latents_to_the_same_images():
    work = Work(32, perceptual=False, model=TOY)
    ours, theirs = (build()() for build in operations.decoders(work, CPU, [BF16]).values())
    assert ours.shape == theirs.shape == (1, 3, 32, 32)
    # weights and activations rounded to 8 bits, in another order
    assert ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item() < 0.05


@pytest.mark.parametrize("one_forward", [False, True])
def test_their_adversarial_step_trains_both_networks(one_forward):
    work = Work(32, batch=2, model=TOY, perceptual=False, adversarial=True)
    side = Theirs(work, CPU, other_side.Variant("fp32", torch.float32, one_forward=one_forward))
    before = [p.clone() for p in (*side.vae.parameters(), *side.discriminator.parameters())]
    side.step()
    after = [*side.vae.parameters(), *side.discriminator.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)
