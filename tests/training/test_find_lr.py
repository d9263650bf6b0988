"""--find_lr: rates are suggested from real steps, and nothing but its own two files changes."""

import copy
import json
import math
import shlex

import numpy as np
import pytest

from tests.harness.training_runs import ONE_PROCESS, alive_of, assert_same
from vae.config.flags import parse_flags, trainer_options
from vae.training.early_checks import Command, check_command
from vae.training.find_lr import NAME, Curve, find_learning_rate, find_lr, losses_before_steps, suggest
from vae.training.run import train
from vae.training.setup import prepare_run
from vae.training.state import snapshot

ONE_LEVEL = {"channels": [8], "image_size": 16}


@pytest.fixture
def options(tiny) -> dict:
    """Options of a quick search, with the smallest network."""
    tiny = {name: value for name, value in tiny.items() if name != "learning_rate"}
    return {**tiny, **ONE_LEVEL, "find_lr": True, "find_lr_steps": 50}


@pytest.mark.slow
def test_search_writes_its_two_files_and_prints_the_command(options, tmp_path, capsys):
    assert find_lr(check_command(trainer_options(options))) == 0
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.glob("[!.]*")) == [f"{NAME}.json", f"{NAME}.png"]
    content = json.loads((folder / f"{NAME}.json").read_text())
    assert len(content["rates"]) == len(content["losses"]) <= 50
    words = shlex.split(capsys.readouterr().out.strip().splitlines()[-1].partition("train with: ")[2])
    given = parse_flags(words[2:])
    assert not any(name.startswith(NAME) for name in given)
    assert given.pop("learning_rate") == pytest.approx(content["steepest"], rel=0.06)
    assert given == parse_flags(words[2 : words.index("--learning_rate")])


@pytest.mark.slow
def test_search_leaves_weights_moments_and_position_as_they_were(options, tiny, tmp_path):
    small = {**tiny, **ONE_LEVEL, "disc_channels": 8, "disc_layers": 1}
    assert train({**small, "adversarial_weight": 0.5, "disc_start": 0.5, "disc_warmup": 0}) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    latest = {"resume_from": "latest", "new_stage": True, "perceptual_weight": 0.0}
    run = prepare_run(Command({**options, **latest}), ONE_PROCESS)
    assert run.state.discriminator is None
    states = [copy.deepcopy(snapshot(run.state))]
    find_learning_rate(run, run.plan(run.state.stage), alive_of(run))
    states.append(copy.deepcopy(snapshot(run.state)))
    assert states[0]["optimizers"][0]["state"][0]["step"] == 6
    for state in states:  # every step sets its own learning rate
        for group in state["optimizers"][0]["param_groups"]:
            group.pop("lr")
    assert_same(states[1], states[0], "state after a search")
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    new = {name for name, content in after.items() if before.get(name) != content}
    assert new - {".lock"} == {f"{NAME}.json", f"{NAME}.png"}


def curve_of(ratio, scale: float = 1.0) -> Curve:
    """A curve whose loss is ratio(log10 of the rate) times that of the unchanged weights."""
    rates = np.geomspace(1e-7, 1, 200).tolist()
    unchanged = [scale * (1 + 0.5 * math.sin(7 * step)) for step in range(200)]  # batches differ
    losses = [before * ratio(math.log10(rate)) for before, rate in zip(unchanged, rates, strict=True)]
    return Curve(rates, losses, unchanged)


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


def test_the_losses_end_where_one_is_not_below_its_limit(options):
    run = prepare_run(Command({**options, "variance_weight": 1.0}), ONE_PROCESS)
    plan, alive = run.plan(run.state.stage), alive_of(run)
    unchanged = losses_before_steps(run, plan, alive, [0.0] * 4)
    assert len(unchanged) == 4
    # the weights, and the statistics of the latents, are the same again
    assert losses_before_steps(run, plan, alive, [1e-7] * 4) == pytest.approx(unchanged, rel=1e-3)
    for limit in (0.0, math.nan):
        limits = [math.inf, math.inf, limit, math.inf]
        assert losses_before_steps(run, plan, alive, [0.0] * 4, limits) == unchanged[:2]


def test_the_rate_of_the_minimum_is_never_suggested():
    """The loss falls faster and faster until it diverges."""
    found = suggest(curve_of(lambda exponent: 1.5 - math.exp(exponent) if exponent < -1 else 3.9))
    assert found.steepest <= 10 * found.tenth / 2
