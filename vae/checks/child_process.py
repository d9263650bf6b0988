"""Child processes that may crash or hang without affecting the report."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO

SECONDS_TO_DIE = 1.0  # a process inside a hung driver ignores even SIGKILL: we stop waiting for it


@dataclass(frozen=True)
class FinishedProcess:
    """How a process ended; `code` is None if it exceeded the time limit."""

    code: int | None
    out: str
    err: str


class ChildProcess:
    """A process that runs until it ends or until `finish` times out; OSError if it cannot start."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None, cwd: str | None = None):
        # Files instead of pipes: nothing has to read while it runs, and a grandchild cannot keep a pipe open.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=env,
            cwd=cwd,
            start_new_session=sys.platform != "win32",  # a process group: its children are killed with it
        )

    def finish(self, timeout_seconds: float) -> FinishedProcess:
        """Wait for the process and kill it after the time limit, or if an exception interrupts the wait."""
        code: int | None
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self._kill()
        return FinishedProcess(code, _text(self._out), _text(self._err))

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # it has already ended
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_DIE)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
