"""Suggested learning rates lie where the loss falls, whatever the batches are."""

import math

import numpy as np
import pytest

from vae.training.trials.lr_range import Curve, has_diverged, suggest


def curve_of(ratio, scale: float = 1.0) -> Curve:
    """A curve whose loss is ratio(log10 of the rate) times that of the unchanged weights."""
    rates = np.geomspace(1e-7, 1, 200).tolist()
    unchanged = [scale * (1 + 0.5 * math.sin(7 * step)) for step in range(200)]  # batches differ
    losses = [before * ratio(math.log10(rate)) for before, rate in zip(unchanged, rates, strict=True)]
    return Curve(0, rates, losses, unchanged)


def valley(exponent: float) -> float:
    """Falls around 1e-4, is lowest at about 1e-2, and rises from there."""
    return 1 - 0.4 / (1 + math.exp(-4 * (exponent + 4))) + math.exp(6 * exponent)


def test_suggestions_lie_where_the_loss_falls_and_below_its_minimum():
    found = suggest(curve_of(valley))
    assert 0.8e-4 < found.steepest < 4e-4  # the mean over steps is late by up to a third of a decade
    assert 1e-3 < 10 * found.tenth < 1e-1


def test_differences_between_batches_cancel():
    """The unchanged weights' own losses vary by a factor of three here."""
    smoothed = curve_of(lambda _: 1.0).smoothed()
    np.testing.assert_allclose(smoothed, 1.0, rtol=1e-12)
    assert suggest(curve_of(valley)) == pytest.approx(suggest(curve_of(valley, scale=100.0)))


def test_a_loss_that_is_no_number_has_diverged():
    assert has_diverged(math.nan, 1.0)
    assert has_diverged(4.1, 1.0)
    assert not has_diverged(3.9, 1.0)


def test_the_rate_of_the_minimum_is_never_suggested():
    """The loss falls faster and faster until it diverges."""
    found = suggest(curve_of(lambda exponent: 1.5 - math.exp(exponent) if exponent < -1 else 3.9))
    assert found.steepest <= 10 * found.tenth / 2
