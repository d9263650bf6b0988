"""A spike of the loss that lasts is divergence; ordinary noise is not. When a checkpoint is good."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from vae.training.stability import MAX_MSE, MIN_RECORDS, SPIKE_STEPS, WINDOW, Stability, spike_threshold

ORDINARY_MSE = 0.1


def fed(losses: Iterable[float], steps: int = 1, stability: Stability | None = None) -> Stability:
    """After records of these losses, of `steps` steps each; none of them may end as divergence."""
    stability = stability or Stability()
    for loss in losses:
        stability.add_record(stability.last_record + steps, float(loss), ORDINARY_MSE)
        assert stability.divergence() is None, stability
    return stability


# ---- the threshold ---------------------------------------------------------------------------------------


def test_no_threshold_before_enough_records():
    assert spike_threshold([0.1] * (MIN_RECORDS - 1)) == math.inf
    assert spike_threshold([0.1] * MIN_RECORDS) < 1


def test_threshold_of_a_smooth_curve_has_a_floor():
    """Without the floor, the spread of equal losses is 0 and the z-score infinite."""
    assert spike_threshold([0.1] * 20) == pytest.approx(0.1 * math.exp(0.8))


def test_threshold_of_a_noisy_curve_follows_its_spread_and_is_above_its_highest_value():
    random = np.random.default_rng(0)
    noisy = list(np.exp(random.normal(0, 0.5, WINDOW)))
    assert spike_threshold(noisy) > 10
    assert spike_threshold([*[1.0] * 60, 9.0]) == pytest.approx(18)  # one hard batch
    assert spike_threshold([1.0] * 60) == spike_threshold([*[1.0] * 60, 1e-30, 0.0])  # a median is robust


def test_threshold_of_a_falling_curve_is_not_raised_by_its_fall():
    falling = [0.4 * 0.97**i for i in range(WINDOW)]  # from 0.4 to 0.06
    assert spike_threshold(falling) == pytest.approx(0.8)


# ---- divergence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "steps"), [(0.02, 1), (0.7, 1), (0.7, 10)])
def test_ordinary_curves_never_diverge(spread, steps):
    """A falling loss with log-normal noise, and one batch in 20 that is ten times as hard."""
    random = np.random.default_rng(0)
    count = 5000 * steps
    curve = 0.4 * np.exp(-np.arange(count) / 3000) + 0.06
    hard = np.where(random.random(count) < 0.05, 10.0, 1.0)
    losses = curve * np.exp(random.normal(0, spread, count)) * hard
    fed(losses.reshape(-1, steps).mean(1), steps)


def test_slow_rise_is_no_spike():
    """The loss may rise when the adversarial term starts: here in 100 records."""
    fed([0.1 * 2.0 ** (i / 100) for i in range(100)], 10, fed([0.1] * WINDOW))


@pytest.mark.parametrize(("steps", "records"), [(1, SPIKE_STEPS), (7, 3), (10, 2), (100, 2)])
def test_jump_that_lasts_is_divergence(steps, records):
    """After at least two records and twenty steps."""
    stability = fed([0.1] * 20, steps)
    fed([0.5] * (records - 1), steps, stability)
    stability.add_record(stability.last_record + steps, 0.5, ORDINARY_MSE)
    reason = stability.divergence()
    assert f"for {steps * records} steps" in reason
    assert "0.5, before at most 0.1" in reason


def test_jump_that_ends_is_forgotten_and_does_not_raise_the_threshold():
    stability = fed([0.1] * 20)
    for _ in range(20):
        fed([50.0] * (SPIKE_STEPS - 1), 1, stability)
        fed([0.1], 1, stability)
    assert max(stability.losses) == 0.1
    assert stability.spike_records == 0


@pytest.mark.parametrize("mse", [MAX_MSE * 1.01, math.inf])
def test_outputs_out_of_range_are_divergence_from_the_first_record_on(mse):
    stability = Stability()
    stability.add_record(10, 0.5, mse)
    assert stability.divergence() is None
    assert stability.at_end(stability.last_record, 0)
    stability.add_record(20, 0.5, mse)
    assert "mean squared error" in stability.divergence()


def test_end_of_a_stage_judges_only_outputs_out_of_range():
    """The last record of an epoch may be a single step."""
    stability = fed([0.1] * 20)
    fed([0.9], 1, stability)
    assert stability.at_end(stability.last_record, 0) is None


def test_losses_of_another_stage_are_not_compared():
    stability = fed([0.01] * WINDOW)
    stability.begin_stage()
    fed([1.0] * 30, 10, stability)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_record_that_is_not_finite_changes_no_judgement(loss):
    stability = fed([0.1] * 20)
    stability.add_record(30, 0.5, ORDINARY_MSE)
    before = stability.losses, stability.spike_steps
    assert not stability.add_record(40, loss, loss)
    assert (stability.losses, stability.spike_steps) == before


# ---- good checkpoints ------------------------------------------------------------------------------------


def test_checkpoint_is_good_after_a_whole_ordinary_record():
    stability = Stability()
    stability.unconfirmed.append((4, Path("four")))  # within the first record: it may have been damaged since
    assert not stability.add_record(10, 0.1, ORDINARY_MSE)
    assert stability.good is None
    stability.unconfirmed.append((10, Path("ten")))
    stability.unconfirmed.append((15, Path("fifteen")))
    assert stability.add_record(20, 0.1, ORDINARY_MSE)
    assert stability.good == Path("ten")
    assert stability.add_record(30, 0.1, ORDINARY_MSE)
    assert stability.good == Path("fifteen")
    assert not stability.add_record(40, 0.1, ORDINARY_MSE)


def test_checkpoint_is_not_good_after_a_spike_or_skipped_steps():
    stability = fed([0.1] * 20)
    stability.unconfirmed.append((20, Path("a")))
    assert not stability.add_record(30, 0.9, ORDINARY_MSE)
    assert not stability.add_record(31, math.nan, math.nan)
    assert stability.good is None
    assert stability.add_record(32, 0.1, ORDINARY_MSE)
    assert stability.good == Path("a")


def test_pruning_keeps_the_good_checkpoint_and_the_one_that_the_next_record_judges():
    """With a checkpoint after each step and a record every ten."""
    stability, judged = Stability(), []
    for step in range(1, 101):
        if step % 10 == 0:
            before = stability.needed()
            stability.add_record(step, 0.1, ORDINARY_MSE)
            if stability.good:
                assert stability.good.name in before
                judged.append(int(stability.good.name))
        stability.unconfirmed.append((step, Path(str(step))))
    assert judged == list(range(10, 100, 10))
    assert stability.needed() == {"90", "100"}


@pytest.mark.parametrize(("streak", "diverged"), [(8, True), (9, True), (7, False), (0, False)])
def test_a_stage_without_a_finite_step_has_diverged(streak, diverged):
    stability = Stability()
    stability.begin(100, None)
    assert (stability.at_end(108, streak) is not None) == diverged
    assert stability.at_end(100, 3) is None  # no step at all: the run was complete
