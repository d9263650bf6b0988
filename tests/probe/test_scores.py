"""Scores by hand, equal to scikit-learn's; the bootstrap finds differences, and none where there is none."""

import numpy as np
import pytest
from sklearn import metrics

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


def test_scores_equal_those_of_scikit_learn():
    random = np.random.default_rng(0)
    targets, probabilities = random.integers(0, 8, 300), random.dirichlet(np.ones(8), 300)
    found, predicted = scores(targets, probabilities), probabilities.argmax(1)
    assert found["top1"] == metrics.accuracy_score(targets, predicted)
    assert found["top5"] == metrics.top_k_accuracy_score(targets, probabilities, k=5)
    assert found["macro_f1"] == metrics.f1_score(targets, predicted, average="macro")
    assert found["log_loss"] == pytest.approx(metrics.log_loss(targets, probabilities), rel=1e-12)
    assert found["recall"] == metrics.recall_score(targets, predicted, average=None).tolist()
    assert found["confusion"] == metrics.confusion_matrix(targets, predicted).tolist()


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
