"""A search with the real trainer."""

import json

import pytest

import tune_vae
from tests.harness.runs import TINY
from tests.harness.stub_trainer import rows_of
from tests.harness.training_runs import records


@pytest.mark.slow
def test_trials_are_real_runs_with_the_same_validation_images(image_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = tmp_path / "base.json"
    folder = tmp_path / "search"
    base.write_text(json.dumps({**TINY, "data_path": str(image_folder)}))
    words = ["--config", str(base), "--output_dir", str(folder), "--trials", "2", "--pruner", "none"]
    assert tune_vae.main(words) == 0
    rows = rows_of(folder)
    assert [row["state"] for row in rows] == ["complete", "complete"]
    splits = set()
    for row in rows:
        run = folder / "trials" / f"{row['trial']:04d}"
        assert row["values"] == [records(run, "validation")[-1]["loss"]]
        assert (run / "vae" / "config.json").exists()
        splits.add(json.dumps(json.loads((run / "split.json").read_text())["validation"]))
    assert len(splits) == 1
