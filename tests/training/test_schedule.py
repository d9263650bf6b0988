"""Exact values of the learning-rate and EMA schedules."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.training_runs import records
from vae.config.options import LossConfig, OptimConfig
from vae.config.resolve import resolve
from vae.system.errors import UserError
from vae.training.run import train
from vae.training.schedule import (
    MAX_PEAK,
    MAX_RANDOM_PEAK,
    RANDOM,
    TRAINED,
    WARM,
    StageSchedule,
    discriminator_steps,
    ema_decay,
    learning_rate_factor,
    peak_learning_rate,
    warmup_steps,
)
from vae.training.stages import Position, Stage, StageSteps


def test_warmup_is_given_in_epochs_and_limited_to_a_fifth_of_the_stage():
    assert warmup_steps(5, steps_per_epoch=10, total_steps=1000) == 50
    assert warmup_steps(0.25, steps_per_epoch=10, total_steps=1000) == 2
    assert warmup_steps(5, steps_per_epoch=10, total_steps=100) == 20
    assert warmup_steps(5, steps_per_epoch=1, total_steps=4) == 0
    assert warmup_steps(0, steps_per_epoch=10, total_steps=1000) == 0


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_linear_warmup_reaches_the_peak_in_its_last_step(schedule):
    rates = [learning_rate_factor(schedule, step, 100, 4) for step in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_from_the_peak_to_zero():
    assert learning_rate_factor("cosine", 0, 100, 0) == 1.0
    assert learning_rate_factor("cosine", 60, 100, 20) == pytest.approx(0.5, abs=1e-15)
    assert learning_rate_factor("cosine", 40, 100, 20) == pytest.approx(0.5 * (1 + math.sqrt(0.5)), abs=1e-15)
    assert 0 < learning_rate_factor("cosine", 99, 100, 20) < 1e-3
    assert learning_rate_factor("cosine", 100, 100, 20) == 0.0


def test_onecycle_starts_at_a_25th_and_ends_at_a_ten_thousandth_of_that():
    rates = [learning_rate_factor("onecycle", step, 1000, 200) for step in range(1001)]
    assert 1 / 25 < rates[0] < 1 / 25 + 1e-3
    assert rates[199] == rates[200] == pytest.approx(1.0, abs=1e-15)
    assert rates[600] == pytest.approx(0.5, abs=1e-5)
    assert rates[1000] == pytest.approx(1 / 25 * 1e-4, rel=1e-9)
    assert rates[:200] == sorted(rates[:200])
    assert rates[200:] == sorted(rates[200:], reverse=True)


@pytest.mark.parametrize(("schedule", "total"), [("cosine", 1), ("onecycle", 2), ("onecycle", 7)])
def test_rate_of_short_stages_is_positive_at_every_step(schedule, total):
    warm_up = warmup_steps(5, 1, total)
    rates = [learning_rate_factor(schedule, step, total, warm_up) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)


def test_ema_decay_rises_to_its_limit():
    steps = (0, 8, 90, 10_000)
    assert [ema_decay(0.999, step) for step in steps] == [0.1, 0.5, 0.91, 0.999]
    assert ema_decay(0.0, 5) == 0.0


def test_ema_of_a_warm_start_counts_it_as_100_steps_and_ends_at_the_last_weights():
    assert [ema_decay(0.999, step, WARM) for step in (0, 100, 10_000)] == [0.96, 0.98, 0.999]
    left = [ema_decay(0.999, 100, WARM, remaining) for remaining in (1000, 40, 8, 4, 1)]
    assert left == [0.98, 0.9, 0.5, 0, 0]
    assert ema_decay(0.0, 5, WARM, 50) == 0.0


@pytest.mark.parametrize("total", [1, 50, 1000])
def test_ema_keeps_the_warm_start_while_the_rate_is_high_and_not_at_the_end(total):
    kept = [1.0]
    for step in range(total):
        kept.append(kept[-1] * ema_decay(0.999, step, WARM, total - step))
    assert kept[total // 5] > 0.01
    assert kept[total] == 0


def test_ema_begins_at_a_trained_vae():
    assert {ema_decay(0.999, step, TRAINED) for step in (0, 8, 90)} == {0.999}


def test_ema_of_a_later_stage_remembers_its_start():
    """A later stage begins with a trained VAE, however few steps the run has made."""
    for first_epoch, begun_from, decay in ((0, WARM, 0.6), (25, WARM, 0.999), (0, TRAINED, 0.999)):
        steps = StageSteps(Stage(first_epoch, 25, 32, 1), per_epoch=4, local_images=1, images=1)
        schedule = StageSchedule(steps, begun_from, 64, OptimConfig(), LossConfig())
        position = Position(epoch=first_epoch + 22, images_in_epoch=2, step=90)  # 10 steps remain
        assert schedule.ema_decay(position) == pytest.approx(decay)
    constant = StageSchedule(steps, WARM, 64, OptimConfig(lr_schedule="constant"), LossConfig())
    assert constant.ema_decay(Position(epoch=22, images_in_epoch=2, step=100)) == 0.98


def test_steps_of_the_discriminator_begin_at_its_start_or_with_the_stage():
    """The steps of the stage: 0 to 99, which are steps 200 to 299 of the run."""
    late = [discriminator_steps(250, 200 + done, done, 100) for done in (0, 49, 50, 51, 99)]
    assert late == [(0, 100), (0, 51), (0, 50), (1, 50), (49, 50)]
    assert [discriminator_steps(150, 200 + done, done, 100) for done in (0, 99)] == [(0, 100), (99, 100)]
    assert discriminator_steps(200, 200, 0, 100) == (0, 100)
    assert discriminator_steps(900, 299, 99, 100) == (0, 1)  # it begins in a later stage


def test_share_of_the_stage_at_which_the_discriminator_begins():
    """Later stages go on with it."""
    loss = LossConfig(adversarial_weight=1.0, disc_start=0.25, disc_warmup=5, disc_ramp=10)
    steps = StageSteps(Stage(2, None, 32, 4, num_steps=100, first_step=40), 3, 4, 4)
    schedule = StageSchedule(steps, WARM, 64, OptimConfig(warmup_epochs=0), loss)
    assert (schedule.disc_first_step, schedule.adversarial_first_step) == (65, 70)
    assert schedule.adversarial_weight(64) is None
    weights = [schedule.adversarial_weight(step) for step in (65, 70, 75, 80)]
    assert weights == pytest.approx([0.0, 0.1, 0.6, 1.0])
    later = replace(schedule, disc_begun_at=30)
    assert (later.disc_first_step, later.adversarial_weight(39)) == (30, 0.5)
    assert replace(later, loss=replace(loss, disc_start=50.0)).disc_first_step == 50
    with pytest.raises(UserError, match=r"--disc_start 1.5 .*use 1"):
        resolve({"disc_start": 1.5})


def test_peak_is_inverse_to_the_width_and_follows_the_length_of_the_stage():
    assert peak_learning_rate(512, WARM, 100_000) == pytest.approx(1e-4)
    assert peak_learning_rate(64, WARM, 400) == pytest.approx(8e-4)
    assert peak_learning_rate(64, WARM, 100) == pytest.approx(2e-4)
    assert peak_learning_rate(64, TRAINED, 100) == pytest.approx(2.5e-5)
    assert peak_learning_rate(64, TRAINED, 4000) == pytest.approx(4e-4)
    assert peak_learning_rate(8, WARM, 400) == MAX_PEAK
    assert peak_learning_rate(512, RANDOM, 10) == pytest.approx(1e-4)  # there is nothing to lose
    assert peak_learning_rate(64, RANDOM, 10) == MAX_RANDOM_PEAK


def test_a_narrow_vae_of_others_gets_the_rate_of_a_wide_one():
    for first_epoch, begun_from, peak in ((0, TRAINED, 5e-5), (25, WARM, 4e-4), (25, TRAINED, 5e-5)):
        steps = StageSteps(Stage(first_epoch, 100, 32, 4), per_epoch=4, local_images=4, images=4)
        schedule = StageSchedule(steps, begun_from, 64, OptimConfig(), LossConfig())
        assert schedule.peak == pytest.approx(peak)


def test_each_divergence_of_the_stage_halves_both_rates():
    steps = StageSteps(Stage(0, 2, 32, 4), 3, 4, 4)
    parts = (steps, WARM, 64, OptimConfig(warmup_epochs=0), LossConfig())
    schedules = [StageSchedule(*parts, divergences=count) for count in range(3)]
    rates = [schedule.learning_rates(Position(images_in_epoch=8, step=2)) for schedule in schedules]
    assert rates[1:] == [tuple(rate / 2**count for rate in rates[0]) for count in (1, 2)]


def test_a_lower_rate_is_a_remedy_only_above_the_rule():
    schedule = StageSchedule(StageSteps(Stage(0, 2, 32, 4), 3, 4, 4), WARM, 64, OptimConfig(), LossConfig())
    assert schedule.remedy == "train for more epochs"
    given = replace(schedule, optim=OptimConfig(learning_rate=1.0))
    assert given.remedy == "lower --learning_rate (now 1), or train for more epochs"


def first_rates(options: dict, folder: Path, **given) -> list[float]:
    options = {name: value for name, value in options.items() if name != "learning_rate"}
    assert train({**options, "output_dir": str(folder), "log_freq": 1, "warmup_epochs": 0, **given}) == 0
    return [record["learning_rate"] for record in records(folder, "train")]


@pytest.mark.slow
def test_stages_begin_with_the_rate_of_their_length_and_start(tiny, tmp_path):
    steps = 3  # of an epoch of 12 images
    warm = peak_learning_rate(16, WARM, 2 * steps)
    stages = {"progressive": "32:2:4,16:1:4", "init": "warm"}
    rates = first_rates(tiny, tmp_path / "a", **stages)
    assert len(rates) == 3 * steps
    assert rates[0] == pytest.approx(warm)
    assert rates[2 * steps] == pytest.approx(peak_learning_rate(16, TRAINED, steps))
    source = tmp_path / "a" / "checkpoint_epoch_3.pt"
    rates = first_rates(tiny, tmp_path / "b", num_epochs=2, init_from=str(source), max_steps=2)
    assert rates[0] == pytest.approx(peak_learning_rate(512, TRAINED, 2 * steps))
    # the checkpoint knows that the stage began with a trained VAE
    assert train({"resume_from": str(tmp_path / "b" / "checkpoint_step_2.pt"), "device": "cpu"}) == 0
    whole = first_rates(tiny, tmp_path / "c", num_epochs=2, init_from=str(source))
    resumed = [record["learning_rate"] for record in records(tmp_path / "b", "train")]
    assert resumed == pytest.approx(whole)
