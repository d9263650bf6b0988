"""Waits for what other processes do."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

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
