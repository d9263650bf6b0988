"""The benchmark of the planner measures the step that is planned."""

import json

import pytest

from tests.harness.runs import run_script


@pytest.mark.slow
def test_on_a_cpu_the_step_takes_what_was_predicted(tmp_path):
    words = ("--device", "cpu", "--sizes", "32", "--rungs", "none", "all", "--json", str(tmp_path / "f.json"))
    found = run_script("benchmarks/memory_plan.py", *words)
    assert found.returncode == 0, found.stderr
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["recompute"] for row in rows] == ["none", "all"]
    for row in rows:
        assert "failure" not in row
        assert abs(row["difference"]) < 0.01
        assert f"{row['measured_gib']:.3f}" in found.stdout
