"""The gain of a search, with its interval."""

import pytest
from scipy import stats

from vae.tuning.results import _STUDENT_T, Gain, smallest_gain


def test_gain_is_paired_by_seed_and_its_interval_is_students():
    gain = Gain("psnr", default=(20.0, 21.0, 25.0), best=(20.5, 21.6, 25.4))
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem([0.5, 0.6, 0.4]))
    assert gain.mean == pytest.approx(0.5)
    assert gain.half_width == pytest.approx((high - low) / 2, rel=1e-3)
    assert gain.is_shown
    assert "better by 0.50 dB" in str(gain)
    for freedom, quantile in enumerate(_STUDENT_T, 1):
        assert quantile == pytest.approx(stats.t.ppf(0.975, freedom), abs=5e-4)


def test_smallest_gain_is_the_half_width_of_independent_repeats():
    assert smallest_gain((20.0, 21.0, 22.0)) == pytest.approx(4.303 * (2 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("best", "words"),
    [((20.3, 21.0, 24.9), "NO GAIN is shown"), ((19.5, 20.6, 24.5), "NO GAIN: the best trial is worse")],
)
def test_no_gain_is_said_plainly(best, words):
    gain = Gain("psnr", default=(20.0, 21.0, 25.0), best=best)
    assert not gain.is_shown
    assert words in str(gain)


def test_lower_lpips_is_better():
    assert Gain("lpips", default=(0.30, 0.31, 0.32), best=(0.20, 0.21, 0.22)).is_shown
