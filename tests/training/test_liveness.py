"""Real signals are answered at once: stop and resume bit for bit, save and continue, or exit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.faults import Fault, injected, start_forked, wait_for
from tests.harness.runs import ROOT
from tests.harness.training_runs import assert_same, last_checkpoint
from tests.harness.waiting import wait_until
from vae.config.flags import command_words
from vae.interop.checkpoint_file import load_checkpoint
from vae.system.errors import EXIT_SAVED_RESUMABLE
from vae.training import liveness as signals_module
from vae.training.liveness import ANSWER, StopSignals
from vae.training.run import train
from vae.training.stages import Position

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has neither these signals nor terminals")
TIMEOUT = 120  # seconds: a busy machine is no failure


@pytest.fixture
def long(tiny) -> dict:
    """A run of 60 steps with a record of each."""
    return {
        **tiny,
        "num_epochs": 20,
        "log_freq": 1,
        "val_freq": 20,
        "checkpoint_freq": 20,
        "keep_checkpoints": 50,
    }


def assert_same_weights(one: Path, other: Path) -> None:
    contents = [last_checkpoint(folder) for folder in (one, other)]
    found, expected = ([content[k] for k in ("position", "model", "ema")] for content in contents)
    assert_same(found, expected, "checkpoint")


def steps(folder: Path) -> list[int]:
    """Steps of the training records that are complete; a running process may be writing another."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["step"] for record in found if record["kind"] == "train"]


# ---- in this process: the signal arrives at a known step -------------------------------------------------


def signal_at(number: int, step: int) -> Fault:
    """This process gets the signal within optimizer step `step` (from 1)."""
    return Fault("signal", "update", nth=step, value=number)


@pytest.mark.slow
def test_stop_signal_saves_and_the_run_can_be_resumed(tiny, tmp_path, capsys):
    """The step in which the signal arrives is the last. No checkpoint stores the options after `latest`."""
    folder, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    with injected(signal_at(signal.SIGTERM, 4)):
        assert train({**tiny, "num_epochs": 4, "max_steps": 100}) == EXIT_SAVED_RESUMABLE
    begin, options = capsys.readouterr().out.splitlines()[-1].split(" --resume_from latest ")
    assert begin.endswith(f"python train_vae.py --output_dir {folder}")
    for option in ("--max_steps 100", "--num_workers 0"):
        assert option in options
    assert last_checkpoint(folder)["position"]["step"] == 4
    assert not (folder / "vae").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    assert train({**tiny, "num_epochs": 4, "resume_from": "latest"}) == 0
    assert load_checkpoint(folder / "checkpoint_epoch_4.pt")["position"]["step"] == 12


@posix
@pytest.mark.slow
def test_save_signal_saves_and_training_continues_unchanged(tiny, tmp_path):
    given = {**tiny, "num_epochs": 3, "checkpoint_freq": 3}
    with injected(signal_at(signal.SIGUSR1, 1), signal_at(signal.SIGUSR1, 4)):
        assert train(given) == 0
    assert train({**given, "output_dir": str(tmp_path / "plain")}) == 0
    assert_same_weights(tmp_path / "run", tmp_path / "plain")
    saved = {path.name: load_checkpoint(path)["position"] for path in (tmp_path / "run").glob("*.pt")}
    assert set(saved) == {"checkpoint_step_2.pt", "checkpoint_step_5.pt", "checkpoint_epoch_3.pt"}
    assert Position(**saved["checkpoint_step_5.pt"]) == Position(1, 8, 5, 20)


# ---- in another process: the signal arrives at any moment ------------------------------------------------


@posix
@pytest.mark.slow
def test_second_signal_exits_at_once(long, tmp_path):
    """The first save lasts until the second signal arrives."""
    folder, log = tmp_path / "run", tmp_path / "console"
    given = {**long, "checkpoint_steps": 1, "background_save": False}
    (process,) = start_forked(given, Fault("slow", "save.flush", value=TIMEOUT), log=log)
    wait_until(lambda: any("checkpoint_step" in name for _, _, names in os.walk(folder) for name in names))
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.6)  # within half a second, both count as one: schedulers and torchrun send their own
    os.kill(process.pid, signal.SIGINT)
    assert wait_for([process]) == [128 + signal.SIGINT]
    assert list(folder.glob("*.pt")) == []
    assert "Traceback" not in log.read_text()


@posix
@pytest.mark.slow
def test_closed_terminal_saves(long, tmp_path):
    """Every process of the terminal gets SIGHUP, also the decoding processes, and all output fails."""
    folder = tmp_path / "run"
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "train_vae.py", *command_words({**long, "num_workers": "1", "num_epochs": 1000})],
        cwd=ROOT,
        stdin=end,
        stdout=end,
        stderr=end,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
        preexec_fn=become_session_leader,
    )
    try:
        os.close(end)
        wait_until(lambda: os.read(terminal, 4096) and len(steps(folder)) >= 4, process)
        os.close(terminal)
        assert process.wait(TIMEOUT) == EXIT_SAVED_RESUMABLE
    finally:
        process.kill()
        process.wait()
    assert last_checkpoint(folder)["position"]["step"] >= 4


def become_session_leader() -> None:
    """Make the terminal at stdin the controlling one of this process."""
    import fcntl  # Windows has neither module
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    ("point", "nth", "code", "step"),
    [
        ("open:image_.*png$", 1, EXIT_SAVED_RESUMABLE, 1),
        ("eval_pass", 2, EXIT_SAVED_RESUMABLE, 4),
        ("eval_pass", 3, 0, 6),
        ("open:safetensors", 1, 0, 6),
    ],
    ids=["loading", "validation", "last_validation", "export"],
)
def test_what_is_under_way_is_finished(tiny, tmp_path, capfd, point, nth, code, step):
    """2 epochs of 3 steps, with a validation of one pass at the start and after each epoch."""
    before = signal.getsignal(signal.SIGINT)
    with injected(Fault("signal", point, nth=nth, value=signal.SIGINT)):
        assert train({**tiny, "init": "default"}) == code
    assert f"{ANSWER}; press Ctrl-C again to exit now\n" in capfd.readouterr().err
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == step
    assert signal.getsignal(signal.SIGINT) is before


def test_duplicate_signal_is_answered_once_and_other_ranks_are_silent(monkeypatch, capfd):
    monkeypatch.setattr(signals_module, "_DUPLICATE_SECONDS", 600.0)  # later, it would end pytest itself
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err.count("Ctrl-C") == 1
    with StopSignals(is_main_process=False) as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop
    assert capfd.readouterr().err == ""


@posix
@pytest.mark.parametrize("ignored", [False, True], ids=["default", "nohup"])
def test_hangups_stop_the_run_once_unless_they_are_ignored(monkeypatch, capfd, ignored):
    """A closing terminal sends several, in more than half a second: a later one must not exit at once."""
    monkeypatch.setattr(signals_module, "_DUPLICATE_SECONDS", 0.0)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert signals.stop is not ignored
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().err.count("Ctrl-C") == (0 if ignored else 1)
