"""A folder has one line of work: what a run goes back behind is moved away, so `latest` is the newest."""

from pathlib import Path

import pytest

from tests.harness.runs import TINY
from tests.harness.steps import before_steps
from tests.harness.training_runs import SHORT, records
from vae.interop.run_files import RUN_NAME
from vae.training.checkpoints import load_newest
from vae.training.provenance import read_good_checkpoint
from vae.training.run import train

# 4 steps per epoch, a checkpoint after each step
RECIPE = {**TINY, **SHORT, "num_epochs": 2, "checkpoint_steps": 1, "keep_checkpoints": 20}


@pytest.fixture
def given(image_folder, tmp_path) -> dict:
    return {**RECIPE, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}


def names(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.pt")}


@pytest.mark.slow
def test_latest_follows_the_run_that_was_resumed_last(given, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train({**given, "max_steps": 6}) == 0
    resumed = {**given, "resume_from": str(folder / "checkpoint_step_2.pt")}

    def kill(*_arguments):
        raise KeyboardInterrupt

    with before_steps(kill), pytest.raises(KeyboardInterrupt):  # before its first checkpoint
        train(resumed)
    assert names(folder) == {"checkpoint_step_1", "checkpoint_step_2"}
    abandoned = {"checkpoint_step_3", "checkpoint_epoch_1", "checkpoint_step_5", "checkpoint_step_6"}
    assert names(folder / "abandoned") == abandoned
    capsys.readouterr()
    assert train({**given, "resume_from": "latest", "max_steps": 5}) == 0
    assert f"from {folder / 'checkpoint_step_2.pt'}, step 2" in capsys.readouterr().out
    assert load_newest(folder)[0].name == "checkpoint_step_5.pt"
    runs = records(folder, "run")
    assert [run["step"] for run in runs] == [0, 2, 2]
    assert len({run["id"] for run in runs}) == 1
    assert [r["step"] for r in records(folder, "train")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", [None, b"", b"\0", b"7", b'{"id": "a"}'])
def test_a_run_file_of_others_names_no_good_checkpoint(tmp_path, content):
    if content is not None:
        (tmp_path / RUN_NAME).write_bytes(content)
    assert read_good_checkpoint(tmp_path) is None
