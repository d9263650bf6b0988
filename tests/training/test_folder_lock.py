"""Two runs cannot use one folder; the lock dies with its process, however that ends."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs import ROOT, run_here, run_script
from tests.harness.steps import before_steps
from tests.harness.training_runs import train_on_two_processes
from vae.config.flags import command_words
from vae.system import lock_file
from vae.system.errors import EXIT_CONFIG, UserError
from vae.system.files import scratch_folder
from vae.system.folder_marker import claim_folder
from vae.training.output.folder_lock import LOCK_NAME, FolderLock
from vae.training.run import train

ACQUIRE = """
import os, sys, time
from pathlib import Path
from vae.training.output.folder_lock import FolderLock
lock = FolderLock()
lock.acquire(Path(sys.argv[1]))
print("locked", flush=True)
"""
HOLD = f"{ACQUIRE}time.sleep(60)"
# The child of a fork has all open files of its parent, as decoding processes do.
HOLD_WITH_A_CHILD = f'{ACQUIRE}os.fork()\nos.write(1, b"%d\\n" % os.getpid())\ntime.sleep(60)'


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


needs_links = pytest.mark.skipif(os.name == "nt", reason="links need special permissions")


@pytest.fixture
def letter(tmp_path) -> Path:
    """A file outside of the folder of a run, which no run may change."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "letter.txt"
    path.write_text("dear")
    return path


@needs_links
def test_nothing_is_written_through_a_link(tiny, tmp_path, letter):
    """At the names of files that a run writes, in its own folder."""
    run = tmp_path / "run"
    claim_folder(run, "train")
    for name in ("config.json", "split.json", "run.json", "rejected_images.txt"):
        (run / name).symlink_to(letter)
    (run / "results.png").hardlink_to(letter)
    assert train({**tiny, "max_steps": 1}) == 0
    assert letter.read_text() == "dear"
    assert [path.name for path in letter.parent.iterdir()] == ["letter.txt"]


@needs_links
@pytest.mark.parametrize("name", ["vae", "samples", "logs"])
def test_a_folder_with_a_link_to_another_one_is_refused(tiny, tmp_path, letter, name):
    claim_folder(tmp_path / "run", "train")
    (tmp_path / "run" / name).symlink_to(letter.parent)
    with pytest.raises(UserError, match=f"contains the link {name} to another folder"):
        train({**tiny, "max_steps": 1})
    assert [path.name for path in letter.parent.iterdir()] == ["letter.txt"]


@needs_links
@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to", "folder"])
def test_lock_that_is_no_file_of_its_own_is_named(tmp_path, letter, kind):
    path = tmp_path / ".lock"
    path.mkdir() if kind == "folder" else getattr(path, kind)(letter)
    with FolderLock() as lock, pytest.raises(UserError, match=r"\.lock: .*remove it"):
        lock.acquire(tmp_path)
    assert letter.read_text() == "dear"


def test_lock_names_the_process_that_holds_it(tmp_path):
    with Holder(tmp_path) as holder, FolderLock() as lock, pytest.raises(UserError) as caught:
        lock.acquire(tmp_path)
    assert f"--output_dir {tmp_path}" in str(caught.value)
    assert f"process {holder.process.pid} on " in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG
    assert "\n" not in str(caught.value)


def test_lock_is_released_at_the_end_of_the_block(tmp_path):
    with FolderLock() as lock:
        lock.acquire(tmp_path)
        lock.acquire(tmp_path)  # a second time is the same lock
        assert f"process {os.getpid()} on" in lock_in_another_process(tmp_path)
    assert lock_in_another_process(tmp_path) == "locked"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")
def test_lock_dies_with_its_process_though_a_child_lives_on(tmp_path):
    with Holder(tmp_path, HOLD_WITH_A_CHILD) as holder:
        numbers = {int(holder.line()), int(holder.line())}
        (child,) = numbers - {holder.process.pid}
        holder.process.kill()
        holder.process.wait()
        try:
            os.kill(child, 0)  # it lives
            with FolderLock() as lock:
                lock.acquire(tmp_path)
        finally:
            os.kill(child, 9)


def test_lock_removes_temporary_files_of_runs_that_were_killed(tmp_path):
    for folder in (tmp_path, tmp_path / "vae"):
        left = folder / ".vae-scratch-0123456789abcdef"
        left.mkdir(parents=True)
        (left / ".scratch").touch()
        (left / "checkpoint_epoch_1.pt").touch()
    (tmp_path / "notes.tmp").touch()  # these are of the user
    (tmp_path / ".vae-scratch-mine").mkdir()
    (tmp_path / ".vae-scratch-mine" / "notes.txt").touch()
    with FolderLock() as lock:
        lock.acquire(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        LOCK_NAME, ".vae-scratch-mine", "notes.tmp", "vae",
    ]  # fmt: skip
    assert not list((tmp_path / "vae").iterdir())


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_arguments: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_file, "_lock", refuse)
    with FolderLock() as lock:
        lock.acquire(tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"WARNING: --output_dir {tmp_path} cannot be locked (No locks available)")


# ---- real runs -------------------------------------------------------------------------------------------


def test_run_holds_the_lock_until_it_ends(tiny, tmp_path):
    folder, found = tmp_path / "run", []
    with before_steps(lambda *_: found.append(lock_in_another_process(folder))):
        assert train({**tiny, "max_steps": 1}) == 0
    assert f"process {os.getpid()} on" in found[0]
    assert lock_in_another_process(folder) == "locked"


def test_second_run_is_refused_before_it_reads_or_writes(tiny, tmp_path):
    folder = tmp_path / "run"
    assert train({**tiny, "max_steps": 1}) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Holder(folder):
        before[folder / LOCK_NAME] = (folder / LOCK_NAME).read_bytes()
        for resume in ({"resume_from": "latest"}, {"resume_from": str(folder / "checkpoint_step_1.pt")}):
            with pytest.raises(UserError, match="is in use by process"):
                train({**tiny, **resume, "max_steps": 2})
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert train({**tiny, "resume_from": "latest", "max_steps": 2}) == 0


@pytest.mark.slow
def test_refusal_of_several_processes_and_of_readers(tiny, tmp_path):
    """Only the main process takes the lock; the other scripts read the folder of a run that goes on."""
    folder = tmp_path / "run"
    assert train({**tiny, "max_steps": 1}) == 0
    with Holder(folder):
        found = train_on_two_processes({**tiny, "resume_from": "latest"}, fails=True)
        assert found.stderr.count("is in use by process") == 1
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
