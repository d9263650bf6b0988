"""Waits for what other processes do, and ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.runs import ROOT

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals, links and file names of Unix")
SECONDS = 120.0  # far more than any wait needs, also on a busy machine


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = SECONDS
) -> None:
    """Wait until `condition()` is true; `process` must not end before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            assert condition(), f"ended with {process.returncode}"
            return
        assert time.monotonic() < deadline, f"still waiting after {seconds} s"
        time.sleep(0.01)


def is_running(pid: int | str) -> bool:
    """Whether a process exists and has not ended (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_when(
    moment: Callable[[], object],
    line: Sequence[object],
    number: int | None = None,
    kill: Callable[[int, int], None] = os.kill,
) -> tuple[int, str]:
    """Run a command and kill or signal it as soon as `moment()` is true; returns its exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, *map(str, line)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    wait_until(moment, process)
    kill(process.pid, number or signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    return process.returncode, err
