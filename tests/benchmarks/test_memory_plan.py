"""The memory benchmark reads what the trainer predicts and reserves."""

import json
from pathlib import Path

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU
SMALL = "--channels 32 32 --norm_groups 8 --kernels torch --eager --sizes 64"


def test_rows_have_both_figures_or_the_reason(image_folder: Path, tmp_path: Path):
    words = ("--data_path", str(image_folder), *SMALL.split(), "--json", str(tmp_path / "rows.json"))
    printed = run_on_null_gpu("benchmarks/memory_plan.py", *words, "--levels", "all", "none", gib=8).stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["recompute"] for row in rows] == ["all", "none"]
    for row in rows:
        assert 0 < row["reserved_gib"] < 1
        assert f"| {row['predicted_gib']:.2f} | {row['reserved_gib']:.2f} |" in printed
    printed = run_on_null_gpu("benchmarks/memory_plan.py", *words, "--levels", "none", "--nothing", gib=8)
    assert "unknown flag --nothing" in printed.stdout
