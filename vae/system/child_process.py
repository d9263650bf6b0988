"""Child processes that leave none behind: what a command has started ends with it, and it with its parent.

Needs only the standard library: the launchers use it before the environment exists.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

SECONDS_TO_END = 10.0  # between the signal that asks a command to end, and SIGKILL
SECONDS_TO_DIE = 1.0  # a process inside a hung driver ignores even SIGKILL: we stop waiting for it
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command with options of subprocess.Popen, as the leader of a process group.

    On Linux it gets SIGTERM when this process dies, even after kill -9. Raises OSError if it cannot start.
    """
    if sys.platform == "linux":
        options["preexec_fn"] = partial(ctypes.CDLL(None).prctl, _SET_DEATH_SIGNAL, signal.SIGTERM)
    return subprocess.Popen(command, start_new_session=sys.platform != "win32", **options)


def end(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to a command and all that it has started, and kill what has not ended in time."""
    try:
        _send(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    finally:  # also after a second signal
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command and all that it has started."""
    _send(process, getattr(signal, "SIGKILL", signal.SIGTERM))
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_DIE)


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(OSError):  # all of them have ended
        if sys.platform != "win32":
            os.killpg(process.pid, number)
        elif number != signal.SIGINT:  # Ctrl-C has reached every process of the console
            process.terminate()


@dataclass(frozen=True)
class FinishedProcess:
    """The end of a process and its output; `code` is None if it exceeded the time limit."""

    code: int | None
    out: str
    err: str


class ChildProcess:
    """A command whose output is kept, until it ends or `finish` times out; OSError if it cannot start."""

    def __init__(self, command: list[str], **options: Any) -> None:
        # Files instead of pipes: nothing has to read while it runs, and a grandchild cannot keep a pipe open.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = start(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, **options
        )

    def finish(self, timeout_seconds: float) -> FinishedProcess:
        """Wait for the process and kill it after the time limit, or if an exception interrupts the wait."""
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout_seconds)
        finally:
            kill(self._process)
        return FinishedProcess(code, _text(self._out), _text(self._err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
