"""The memory benchmark measures the step that the plan predicts."""

import json

import pytest

from tests.harness.runs import run_script


@pytest.mark.slow
def test_measured_memory_on_a_cpu_equals_the_prediction(tmp_path):
    words = (
        "--device",
        "cpu",
        "--sizes",
        "32",
        "--recompute",
        "all",
        "--json",
        str(tmp_path / "f.json"),
    )
    found = run_script("benchmarks/memory_plan.py", *words)
    assert found.returncode == 0, found.stderr
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["recompute"] for row in rows] == ["all"]
    for row in rows:
        assert "failure" not in row
        assert abs(row["difference"]) < 0.01
        assert f"{row['measured_gib']:.3f}" in found.stdout
