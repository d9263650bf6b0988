"""A search with the real trainer."""

import json

import pytest

import tune_vae
from tests.harness.runs import TINY
from tests.harness.stub_trainer import rows_of
from tests.harness.training_runs import records
from vae.tuning.training_process import Kind, train


def test_options_that_the_trainer_refuses_reject_the_trial(image_folder, tmp_path):
    folder = tmp_path / "trial"
    folder.mkdir()
    options = {**TINY, "data_path": str(image_folder), "vram_margin": 0.01}
    ended = train(folder, options, None, lambda _record: False)
    assert (ended.kind, ended.validations) == (Kind.REJECTED, [])
    assert "--vram_margin 0.01" in ended.reason


@pytest.mark.slow
def test_trials_are_real_runs_with_the_same_validation_images(image_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base, folder = tmp_path / "base.json", tmp_path / "search"
    base.write_text(json.dumps({**TINY, "data_path": str(image_folder)}))
    words = ["--config", str(base), "--output_dir", str(folder), "--trials", "1", "--seeds", "2"]
    assert tune_vae.main([*words, "--pruner", "none"]) == 0
    rows = rows_of(folder)
    assert [row["state"] for row in rows] == ["complete"]
    for row in rows:
        run = folder / row["folder"] / "run"
        assert row["values"]["psnr"] == records(run, "validation")[-1]["psnr"]
        assert (run / "vae" / "config.json").exists()
    runs = [*folder.glob("trials/*/run"), *folder.glob("repeats/*/run")]
    splits = {json.dumps(json.loads((run / "split.json").read_text())["validation"]) for run in runs}
    assert len(splits) == 1
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png") >= 1
