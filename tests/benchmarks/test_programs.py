"""benchmarks/short_runs.py measures every combination; memory_plan.py reads what the trainer reserves."""

import json

import pytest

from tests.harness.runs import run_script
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = pytest.mark.slow


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


@NEEDS_NULL_GPU[1]
def test_rows_have_the_predicted_and_the_reserved_memory(image_folder, tmp_path):
    words = ["--data_path", str(image_folder), "--json", str(tmp_path / "rows.json"), "--levels", "all"]
    words += [
        "--channels",
        "32",
        "32",
        "--norm_groups",
        "8",
        "--kernels",
        "torch",
        "--eager",
        "--sizes",
        "64",
    ]
    printed = run_on_null_gpu("benchmarks/memory_plan.py", *words, gib=8).stdout
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert 0 < row["reserved_gib"] < 1
    assert f"| {row['predicted_gib']:.2f} | {row['reserved_gib']:.2f} |" in printed
