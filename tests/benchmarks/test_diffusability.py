"""benchmarks/diffusability.py: crops that are held out, and the rank correlation."""

import numpy as np
import pytest
import torch

from benchmarks.diffusability import draws_of, family, parts_of, spearman


def test_rank_correlation_with_ties():
    a, b = np.array([1.0, 2.0, 2.0, 4.0]), np.array([10.0, 30.0, 20.0, 40.0])
    assert spearman(a, a**3) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert spearman(a, b) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)  # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4


def test_held_out_crops_share_no_pixel_with_those_for_training():
    photo = torch.arange(12).expand(3, 2, 12)
    (left,), (right,) = parts_of([photo])
    assert left.tolist()[0][0] == list(range(10))
    assert right.tolist()[0][0] == [10, 11]


def test_the_bootstrap_draws_whole_families():
    names = ["KL 1e-6", "KL 1e-4", "variance", "scale equivariance", "scale equivariance, longer"]
    expected = ["KL", "KL", "variance", "scale equivariance", "scale equivariance"]
    assert [family(name) for name in names] == expected
    for draw in draws_of(names):
        assert (draw == 0).sum() == (draw == 1).sum()
        assert (draw == 3).sum() == (draw == 4).sum()
