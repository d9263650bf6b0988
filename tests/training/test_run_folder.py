"""Two runs cannot use one folder; the lock dies with its process, however that ends."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs import ROOT, run_here, run_script
from tests.harness.steps import before_steps
from tests.harness.training_runs import train_on_two_processes
from vae.config.flags import command_words
from vae.system.errors import EXIT_CONFIG, UserError
from vae.system.files import claim_folder, scratch_folder
from vae.training import run_folder
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
    for folder in (tmp_path, tmp_path / "vae"):
        left = folder / ".vae-scratch-0123456789abcdef"
        left.mkdir(parents=True)
        (left / "checkpoint_epoch_1.pt").touch()
    (tmp_path / "notes.tmp").touch()  # these are of the user
    (tmp_path / ".vae-scratch-mine").mkdir()
    (tmp_path / ".vae-scratch-mine" / "notes.txt").touch()
    with FolderLock() as lock:
        lock.acquire(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - {LOCK_NAME}  # Windows removes the lock
    assert left == {".vae-scratch-mine", "notes.tmp", "vae"}
    assert not list((tmp_path / "vae").iterdir())


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.FileLock, "acquire", refuse)
    with FolderLock() as lock:
        lock.acquire(tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"WARNING: --output_dir {tmp_path} cannot be locked ([Errno")


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
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Holder(folder):
        before[folder / LOCK_NAME] = (folder / LOCK_NAME).read_bytes()
        for resume in ({"resume_from": "latest"}, {"resume_from": str(folder / "checkpoint_step_1.pt")}):
            with pytest.raises(UserError, match=f"--output_dir {folder} is in use by .*: wait") as caught:
                train({**tiny, **resume, "max_steps": 2})
            assert caught.value.exit_code == EXIT_CONFIG
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
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


def test_unfinished_files_of_a_run_inside_are_kept(tmp_path):
    """./outputs may be the folder of a run, and ./outputs/demo that of another one, which is saving."""
    for name in ("samples", "demo"):
        (tmp_path / name).mkdir()
    claim_folder(tmp_path / "demo", "train")
    with (
        scratch_folder(tmp_path / "samples"),
        scratch_folder(tmp_path / "demo") as saving,
        FolderLock() as lock,
    ):
        lock.acquire(tmp_path)
        assert saving.is_dir()
        assert not list((tmp_path / "samples").iterdir())
