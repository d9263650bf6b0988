"""A run writes only into its own folder, which no other run can use; the lock dies with its process."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.checkpoints import checkpoint
from tests.harness.runs import ROOT, run_here, run_script
from tests.harness.steps import before_steps
from tests.harness.training_runs import last_checkpoint, train_on_two_processes
from vae.config.flags import command_words
from vae.interop.checkpoint_file import save_checkpoint
from vae.interop.vae_path import WEIGHTS_NAME
from vae.system.errors import EXIT_CONFIG, UserError
from vae.system.files import claim_folder, read_marker, sha256_of_file
from vae.training import export, run_folder
from vae.training import run as run_module
from vae.training.export import CHECKPOINT_KEY, RUN_KEY, stored_metadata
from vae.training.run import train
from vae.training.run_folder import LOCK_NAME, FolderLock

ACQUIRE = """
import os, sys, time
from pathlib import Path
from vae.training import run_folder
run_folder.WAIT_SECONDS = 0.0
lock = run_folder.FolderLock()
lock.acquire(Path(sys.argv[1]))
print("locked", flush=True)
"""
HOLD = f"{ACQUIRE}time.sleep(60)"


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    monkeypatch.setattr(run_folder, "WAIT_SECONDS", 0.0)


class Holder:
    """Another process that runs `code`, which locks the folder; killed at the end of the block."""

    def __init__(self, folder: Path, code: str = HOLD):
        command = [sys.executable, "-c", code, str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Holder":
        assert self.line() == "locked"
        return self

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __exit__(self, *_exception: object) -> None:
        self.process.kill()
        self.process.wait()


def lock_in_another_process(folder: Path) -> str:
    """The output of a process that tries to lock the folder."""
    found = run_script("-c", ACQUIRE, str(folder))
    return found.stdout.strip() or found.stderr.strip().splitlines()[-1]


def test_lock_removes_temporary_files_of_runs_that_were_killed(tmp_path):
    claim_folder(tmp_path / "demo", "train")  # of another run, which is saving
    for folder in (tmp_path, tmp_path / "vae", tmp_path / "demo"):
        left = folder / ".vae-scratch-0123456789abcdef"
        left.mkdir(parents=True)
        (left / "checkpoint_epoch_1.pt").touch()
    (tmp_path / "notes.tmp").touch()  # these are of the user
    (tmp_path / ".vae-scratch-mine").mkdir()
    (tmp_path / ".vae-scratch-mine" / "notes.txt").touch()
    with FolderLock() as lock:
        lock.acquire(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - {LOCK_NAME}  # Windows removes the lock
    assert left == {".vae-scratch-mine", "demo", "notes.tmp", "vae"}
    assert not list((tmp_path / "vae").iterdir())
    assert list((tmp_path / "demo").glob(".vae-scratch-*"))


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.FileLock, "acquire", refuse)
    with FolderLock() as lock:
        lock.acquire(tmp_path)
    assert f"WARNING: --output_dir {tmp_path} cannot be locked ([Errno" in capsys.readouterr().out


# ---- real runs -------------------------------------------------------------------------------------------


def test_run_holds_the_lock_until_it_ends(tiny, tmp_path):
    folder, found = tmp_path / "run", []
    with before_steps(lambda *_: found.append(lock_in_another_process(folder))):
        assert train({**tiny, "max_steps": 1}) == 0
    assert "is in use by another process" in found[0]
    assert lock_in_another_process(folder) == "locked"


def test_second_run_is_refused_before_it_reads_or_writes(tiny, tmp_path):
    folder = tmp_path / "run"
    assert train({**tiny, "max_steps": 1}) == 0
    with Holder(folder):
        before = tree(folder)
        for resume in ({"resume_from": "latest"}, {"resume_from": str(folder / "checkpoint_step_1.pt")}):
            with pytest.raises(UserError, match=f"--output_dir {folder} is in use by .*: wait") as caught:
                train({**tiny, **resume, "max_steps": 2})
            assert caught.value.exit_code == EXIT_CONFIG
        assert tree(folder) == before
    assert train({**tiny, "resume_from": "latest", "max_steps": 2}) == 0


@pytest.mark.slow
def test_refusal_of_several_processes_and_of_readers(tiny, tmp_path):
    """Only the main process takes the lock; the other scripts read the folder of a run that goes on."""
    folder = tmp_path / "run"
    assert train({**tiny, "max_steps": 1}) == 0
    with Holder(folder):
        found = train_on_two_processes({**tiny, "resume_from": "latest"}, fails=True)
        assert found.stderr.count("is in use by another process") == 1
        given = {"vae": folder / "checkpoint_step_1.pt", "output": tmp_path / "exported", "device": "cpu"}
        exported = run_here("export_vae.py", *command_words({**given, "data_path": tiny["data_path"]}))
        assert exported.returncode == 0, exported.stderr
    train_on_two_processes({**tiny, "resume_from": "latest", "batch_size": 2})


# ---- what is in the folder --------------------------------------------------------------------------------


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
    monkeypatch.setattr(export, "write_vae", crash)
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
