"""--profile_steps writes a trace and a table."""

import json

import pytest

from tests.harness.training_runs import train_short


@pytest.mark.slow
def test_profile_contains_a_trace_and_a_table(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", batch_size=2, profile_steps=2)
    folder = tmp_path / "run" / "profile" / "32px"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "convolution" in (folder / "table.txt").read_text()


def test_profile_longer_than_the_run_is_no_error(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", profile_steps=50, max_steps=2)
