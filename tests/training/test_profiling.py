"""--profile_steps writes a trace and a table."""

import json
from pathlib import Path

import pytest

from tests.harness.runs import run_script
from tests.harness.training_runs import SHORT, train_short
from vae.config.flags import command_words


@pytest.mark.slow
def test_profile_contains_a_trace_and_a_table(tiny):
    given = {**tiny, **SHORT, "batch_size": 2, "profile_steps": 2}
    found = run_script("train_vae.py", *command_words(given))
    assert found.returncode == 0, found.stderr
    folder = Path(given["output_dir"]) / "profile" / "32px"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "convolution" in (folder / "table.txt").read_text()


def test_profile_longer_than_the_run_is_no_error(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", profile_steps=50, max_steps=2)
