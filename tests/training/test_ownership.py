"""A run writes only into its own folder, and decides by content, not by the times of files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.harness.checkpoints import checkpoint
from tests.harness.training_runs import last_checkpoint
from vae.interop.checkpoint_file import save_checkpoint
from vae.interop.vae_files import CHECKPOINT_KEY, RUN_KEY
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import stored_metadata
from vae.system.errors import UserError
from vae.system.files import claim_folder, read_marker, sha256_of_file
from vae.training import export
from vae.training import run as run_module
from vae.training.run import train

FOREIGN = "contains files that this command did not write"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def pretrained(folder: Path) -> None:
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / "config.json").write_text("{}")
    (folder / "vae" / WEIGHTS_NAME).write_bytes(b"weights")


def copied_checkpoint(folder: Path) -> None:
    folder.mkdir()
    save_checkpoint(folder / "checkpoint_epoch_2.pt", checkpoint(2))


@pytest.mark.parametrize("resume", [{}, {"resume_from": "latest"}])
@pytest.mark.parametrize("fill", [pretrained, copied_checkpoint])
def test_a_folder_of_others_is_refused_and_not_changed(tiny, tmp_path, fill, resume):
    fill(tmp_path / "run")
    before = tree(tmp_path)
    with pytest.raises(UserError, match=FOREIGN):
        train({**tiny, **resume})
    assert tree(tmp_path) == before


def test_files_of_the_user_in_the_folder_of_a_run_are_kept(tiny, tmp_path):
    run = tmp_path / "run"
    assert train({**tiny, "max_steps": 1}) == 0
    for name in ("notes.txt", "checkpoint_epoch_9.pt.tmp", ".mine.4711.tmp"):
        (run / name).write_text("mine")
    assert train({**tiny, "resume_from": "latest", "max_steps": 2}) == 0
    assert all((run / name).read_text() == "mine" for name in ("notes.txt", ".mine.4711.tmp"))
    assert (run / "checkpoint_epoch_9.pt.tmp").read_text() == "mine"


def test_a_run_has_the_id_of_its_folder_and_a_parent_in_another_one(tiny, tmp_path):
    run = tmp_path / "run"
    claim_folder(run, "train")  # killed before it wrote anything
    assert train({**tiny, "max_steps": 1}) == 0
    first = read_marker(run).id
    assert json.loads((run / "run.json").read_text())["id"] == first
    assert train({**tiny, "resume_from": "latest", "max_steps": 4}) == 0
    identity = last_checkpoint(run)["run"]
    assert (identity["id"], identity["parent"], identity["restarts"]) == (first, "", 1)
    # Into another folder, in which a run was killed early, too.
    other = claim_folder(tmp_path / "other", "train")
    changes = {"resume_from": str(run / "checkpoint_step_4.pt"), "output_dir": str(tmp_path / "other")}
    assert train({**tiny, **changes, "learning_rate": 0.0}) == 0
    found = last_checkpoint(tmp_path / "other")
    expected = {"id": other.id, "parent": first, "restarts": 2, "start": identity["start"]}
    assert found["run"] == expected
    assert (tmp_path / "other" / found["history"]["best_checkpoint"]).is_file()  # not of the first folder
    assert train({**tiny, **changes, "resume_from": "latest", "num_epochs": 3, "max_steps": 7}) == 0


def test_a_run_that_another_command_begins_meanwhile_is_not_trained_over(tiny, tmp_path, monkeypatch):
    prepare_run = run_module.prepare_run

    def slowly(command, dist):
        monkeypatch.setattr(run_module, "prepare_run", prepare_run)
        assert train({**tiny, "max_steps": 1}) == 0
        return prepare_run(command, dist)

    monkeypatch.setattr(run_module, "prepare_run", slowly)
    with pytest.raises(UserError, match="meanwhile"):
        train({**tiny, "seed": 1})
    assert last_checkpoint(tmp_path / "run")["config"]["seed"] == 0


def test_a_checkpoint_of_another_run_is_not_resumed_in_the_folder(tiny, tmp_path):
    claim_folder(tmp_path / "run", "train")
    save_checkpoint(tmp_path / "run" / "checkpoint_epoch_2.pt", checkpoint(2))
    for wanted in ("latest", str(tmp_path / "run" / "checkpoint_epoch_2.pt")):
        with pytest.raises(UserError, match=r"is not of the run in --output_dir .*: give a new --output_dir"):
            train({**tiny, "resume_from": wanted})


def test_a_copy_of_a_run_that_was_killed_before_its_export_exports(tiny, tmp_path, monkeypatch, capsys):
    """`cp -r` gives all files new times: the folder of an earlier stage then seems to be the newest."""

    def crash(*_arguments):
        raise KeyboardInterrupt

    run, copy = tmp_path / "run", tmp_path / "copy"
    assert train({**tiny, "num_epochs": 1}) == 0
    monkeypatch.setattr(export, "save_diffusers_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        train({"resume_from": str(run / "checkpoint_epoch_1.pt"), "num_epochs": 1})
    monkeypatch.undo()
    shutil.copytree(run, copy)
    for path in (copy / "vae").iterdir():
        os.utime(path, (2e9, 2e9))
    for expected in ("writing its vae folder", "nothing to do"):
        capsys.readouterr()
        assert train({"output_dir": str(copy), "resume_from": "latest"}) == 0
        assert expected in capsys.readouterr().out
        found = stored_metadata(copy / "vae" / WEIGHTS_NAME)
        assert found[CHECKPOINT_KEY] == sha256_of_file(copy / "checkpoint_epoch_2.pt")
        assert found[RUN_KEY] == read_marker(run).id
    assert [path.name for path in copy.glob("vae*")] == ["vae"]
