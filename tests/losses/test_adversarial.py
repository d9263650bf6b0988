"""Adversarial terms computed by hand, and their adaptive weight: formula, start, micro-batches."""

import math

import pytest
import torch

from vae.losses.adversarial import (
    adaptive_weight,
    discriminator_loss,
    generator_loss,
    ramp,
    squared_norm,
    squared_norm_at_gap_1,
    update_running,
)


def test_losses_by_hand():
    real = torch.tensor([[2.0, 0.5], [1.0, -1.0]])
    fake = torch.tensor([[1.0, 0.5], [1.0, 1.0]])
    # gaps: image 0: 1 and 0, image 1: 0 and -2
    assert discriminator_loss(real, fake).tolist() == [0.25, 2.5]
    assert generator_loss(real, fake).tolist() == [0.25, 1.0]
    assert generator_loss(real.bfloat16(), fake.bfloat16()).dtype == torch.float32


def test_what_a_pair_has_in_common_cancels():
    real, fake, common = torch.randn(3, 2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for loss in (discriminator_loss, generator_loss):
        assert torch.allclose(loss(real + 9 * common, fake + 9 * common), loss(real, fake), atol=1e-5)


def test_norm_at_gap_1_does_not_depend_on_the_gap():
    """The term vanishes with the gap; the adaptive weight must not bring it back."""
    recon = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = []
    for gap in (0.0, 1e-4, 1.0, 100.0):
        fake = recon.flatten(1).mean(1)
        losses = generator_loss((fake + gap).detach(), fake)
        (gradient,) = torch.autograd.grad(losses.sum(), recon)
        found.append(float(squared_norm_at_gap_1(gradient, losses.detach())))
    # the gradient of a mean of 192 values: 192 values of 1 / 192, in each of two images
    assert found == [0.0, *[pytest.approx(2 / 192, rel=1e-2)] * 3]


def test_adaptive_weight_by_hand():
    rec, adv, zero = torch.tensor(0.09), torch.tensor(0.01), torch.zeros(())
    assert math.isclose(adaptive_weight(rec, adv, 100.0).item(), 3.0, rel_tol=1e-6)
    assert adaptive_weight(rec, adv, 2.0).item() == 2.0
    for no_history in (zero, rec):  # the adversarial term has no measurement yet
        assert adaptive_weight(no_history, zero, 100.0).item() == 0.0


def test_adaptive_weight_balances_the_two_gradients():
    generator = torch.Generator().manual_seed(0)
    rec = torch.randn(2, 3, 8, 8, generator=generator)
    adv = 1e-3 * torch.randn(2, 3, 8, 8, generator=generator)
    weight = adaptive_weight(squared_norm(rec), squared_norm(adv), 1e9)
    assert torch.allclose((weight * adv).norm(), rec.norm())


def test_running_ratio_is_correct_from_the_first_step_and_ignores_a_common_scale():
    running = torch.zeros(2)
    for scale in (1.0, 2.0**16, 2.0**15):  # a loss scale multiplies both norms
        running = update_running(running, torch.tensor([0.09, 0.01]) * scale)
        assert math.isclose(adaptive_weight(*running, 100.0).item(), 3.0, rel_tol=1e-6)


def test_running_value_by_hand_and_a_non_finite_step_changes_nothing():
    running = update_running(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]), decay=0.75)
    assert torch.allclose(running, torch.tensor([1.5, 3.0]))
    for bad in (float("nan"), float("inf")):
        assert torch.equal(update_running(running, torch.tensor([5.0, bad])), running)


def test_squared_norms_of_micro_batches_add_up():
    gradient = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = sum(squared_norm(part) for part in gradient.split([1, 3]))
    assert torch.allclose(parts, squared_norm(gradient), rtol=1e-13)
    assert squared_norm(gradient.bfloat16()).dtype == torch.float32


def test_ramp():
    assert [ramp(step, 10, 4) for step in (0, 9, 10, 11, 12, 13, 14, 99)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert [ramp(step, 10, 0) for step in (9, 10)] == [0, 1]


def test_nothing_copies_a_value_to_the_host():
    """Meta tensors have no values, so code that runs on them never waits for a GPU."""
    norms = torch.zeros(2, device="meta")
    weight = adaptive_weight(*update_running(norms, norms), 100.0)
    logits = torch.zeros(2, 1, 4, 4, device="meta")
    total = discriminator_loss(logits, logits) + weight * generator_loss(logits, logits)
    assert total.shape == (2,)
    assert squared_norm_at_gap_1(logits, total).is_meta
