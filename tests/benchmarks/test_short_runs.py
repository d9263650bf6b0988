"""benchmarks/short_runs.py measures every combination, and trains."""

import json

import pytest

from tests.harness.runs import run_script


@pytest.mark.slow
def test_every_combination_is_trained_and_measured(image_folder):
    flags = ["--photos", str(image_folder), "--size", "32", "--batch", "2", "--channels", "8", "16"]
    flags += ["--norm_groups", "2", "--steps", "1", "2", "--peaks", "1e-4", "1e-3", "--optimizer", "muon"]
    done = run_script("benchmarks/short_runs.py", *flags)
    assert done.returncode == 0, done.stderr
    start, *runs = map(json.loads, done.stdout.splitlines())
    assert [(run["steps"], run["peak"]) for run in runs] == [(1, 1e-4), (1, 1e-3), (2, 1e-4), (2, 1e-3)]
    assert len({run["psnr"] for run in runs}) == 4
    for run in runs:
        assert run["gain"] == pytest.approx(run["psnr"] - start["start"]["psnr"])
