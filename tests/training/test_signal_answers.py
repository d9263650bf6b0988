"""A stop signal is answered at once: with what happens until the process exits, in every part of a run."""

import os
import signal
import subprocess
import sys

import pytest

from tests.harness.faults import Fault, injected
from tests.harness.training_runs import last_checkpoint
from vae.system import console
from vae.system.errors import EXIT_SAVED_RESUMABLE
from vae.training.recovery import signals as signals_module
from vae.training.recovery.signals import EXPORT, LAST_VALIDATION, LOADING, STEP, VALIDATION, StopSignals
from vae.training.run import train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows sends no signals to other processes")


@pytest.mark.parametrize(
    ("point", "nth", "answer", "code", "step"),
    [
        ("open:image_.*png$", 1, LOADING, EXIT_SAVED_RESUMABLE, 1),
        ("eval_pass", 1, VALIDATION, EXIT_SAVED_RESUMABLE, 1),
        ("update", 2, STEP, EXIT_SAVED_RESUMABLE, 2),
        ("eval_pass", 2, VALIDATION, EXIT_SAVED_RESUMABLE, 4),
        ("eval_pass", 3, LAST_VALIDATION, 0, 6),
        ("open:safetensors", 1, EXPORT, 0, 6),
    ],
    ids=["loading", "first_validation", "step", "validation", "last_validation", "export"],
)
def test_answer_describes_what_happens(tiny, tmp_path, capfd, point, nth, answer, code, step):
    """2 epochs of 3 steps, with a validation of one pass at the start and after each epoch."""
    with injected(Fault("signal", point, nth=nth, value=signal.SIGINT)):
        assert train({**tiny, "init": "default"}) == code
    assert f"{answer}; press Ctrl-C again to exit now\n" in capfd.readouterr().err
    assert last_checkpoint(tmp_path / "run")["position"]["step"] == step


def test_answer_is_written_in_the_handler(capfd):
    with StopSignals() as signals, signals.answering("finishing this test"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == "finishing this test; press Ctrl-C again to exit now\n"
    assert signals.answer == LOADING


def test_duplicate_signal_is_answered_once_and_other_ranks_are_silent(monkeypatch, capfd):
    monkeypatch.setattr(signals_module, "_DUPLICATE_SECONDS", 600.0)  # later, it would end pytest itself
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err.count("Ctrl-C") == 1
    with StopSignals(is_main_process=False) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ignored", [False, True], ids=["default", "nohup"])
def test_hangups_stop_the_run_once_unless_they_are_ignored(monkeypatch, capfd, ignored):
    """A closing terminal sends several, in more than half a second: a later one must not exit at once."""
    monkeypatch.setattr(signals_module, "_DUPLICATE_SECONDS", 0.0)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stop is not ignored
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().err.count("Ctrl-C") == (0 if ignored else 1)


def test_save_signal_needs_no_answer(capfd):
    with StopSignals():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert capfd.readouterr().err == ""


def test_closed_stderr_does_not_stop_the_run():
    code = "from vae.system import console; import os; os.close(2); console.error_from_signal_handler('x')"
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0


def test_answer_starts_a_new_line_on_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(os, "isatty", lambda _descriptor: True)
    console.error_from_signal_handler("finishing")
    assert capfd.readouterr().err == "\nfinishing\n"
