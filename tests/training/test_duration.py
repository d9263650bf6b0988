"""The expected duration of a stage: from its steps after the first, and again if it changes by a third."""

import re
import time

import pytest

from vae.training.records.duration import MIN_SECONDS, StageDuration, duration_line, duration_text
from vae.training.run import train


def printed(seconds_per_step: list[float], total: int) -> dict[int, float]:
    """The printed estimates by step, if steps take these seconds."""
    duration, now, found = StageDuration(), 0.0, {}
    for step, seconds in enumerate(seconds_per_step, start=1):
        now += seconds
        left = duration.add(step, now, total - step)
        if left is not None:
            found[step] = left
    return found


def test_estimate_comes_once_after_the_first_seconds_and_ignores_the_first_step():
    found = printed([60.0] + [1.0] * 99, total=100)
    (step,) = found
    assert step == 1 + MIN_SECONDS
    assert found[step] == pytest.approx(100 - step)


def test_slower_steps_change_the_estimate_again():
    found = printed([1.0] * 300 + [4.0] * 300, total=1000)
    first, *later = found
    assert first < 10
    assert later
    assert min(later) > 300
    assert found[max(later)] > 4 * (1000 - max(later)) * 2 / 3  # most of the change is known by then


def test_number_of_marks_is_bounded():
    duration = StageDuration()
    for step in range(1, 1001):
        duration.add(step, float(step), 1000 - step)
    assert len(duration.marks) <= 502


def test_finished_stage_is_not_estimated():
    assert printed([10.0, 10.0], total=2) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (45, "45 s"),
        (100, "2 min"),
        (59.6 * 60, "1 h"),
        (3.34 * 3600, "3 h 20 min"),
        (48 * 3600, "2 days"),
        (53 * 3600, "2 days 5 h"),
    ],
)
def test_durations_are_rounded_for_people(seconds, text):
    assert duration_text(seconds) == text


def test_line_names_the_local_time_of_the_end():
    morning = time.mktime((2026, 3, 4, 10, 45, 0, 0, 0, -1))
    assert duration_line(3.34 * 3600, morning) == "stage: about 3 h 20 min, until 14:05"
    assert duration_line(30 * 3600, morning) == "stage: about 30 h, until 2026-03-05 16:45"


def test_run_prints_it_into_a_log_file(tiny, monkeypatch, capsys):
    monkeypatch.setattr("vae.training.records.duration.MIN_SECONDS", 0.0)
    assert train({**tiny, "max_steps": 5}) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stage: ")]
    assert re.fullmatch(r"stage: about \d+ s, until (\d{4}-\d\d-\d\d )?\d\d:\d\d", lines[0])
