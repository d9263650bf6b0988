"""Scores by hand; the bootstrap finds differences, and none where there is none."""

import numpy as np
import pytest

from vae.probe.scores import paired_bootstrap, scores

TARGETS = np.array([0, 0, 1, 2])
PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.1, 0.8, 0.1], [0.5, 0.4, 0.1]])


def test_scores_of_a_small_case_by_hand():
    found = scores(TARGETS, PROBABILITIES)
    assert found["top1"] == 0.5
    assert found["top5"] == 1.0
    assert found["confusion"] == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert found["recall"] == [0.5, 1.0, 0.0]
    assert found["macro_f1"] == pytest.approx((0.5 + 2 / 3 + 0) / 3)
    assert found["log_loss"] == pytest.approx(-np.log([0.7, 0.3, 0.8, 0.1]).mean())


def test_top5_has_the_true_class_among_the_five_largest():
    ranked = np.array([6, 5, 4, 3, 2, 1]) / 21
    assert scores(np.array([0, 4, 5, 5]), np.tile(ranked, (4, 1)))["top5"] == 0.5


def test_bootstrap_is_paired_and_draws_groups():
    random = np.random.default_rng(0)
    hard = random.random(400) < 0.5
    first, second = hard | (random.random(400) < 0.2), hard
    groups = np.arange(400)
    better = paired_bootstrap(first, second, groups)
    assert better["low"] > 0
    assert better["difference"] == pytest.approx((first.astype(float) - second).mean())
    assert paired_bootstrap(hard, hard, groups) == {"difference": 0, "low": 0, "high": 0, "share": 0.5}
    wide = paired_bootstrap(first, second, groups // 100)
    assert wide["high"] - wide["low"] != better["high"] - better["low"]
