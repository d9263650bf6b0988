"""Programs run beside this one that may crash or hang, and must not take the report with them."""

import contextlib
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass

SECONDS_TO_DIE = 1.0  # a process inside a hung driver does not even die of SIGKILL: it is left behind


@dataclass(frozen=True)
class Outcome:
    """How a program ended; `code` is None where its time was up."""

    code: int | None
    out: str
    err: str


class Child:
    """A program that runs until it ends or `finish` has waited long enough; OSError where it cannot start."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None, cwd: str | None = None):
        # Files and not pipes: nobody has to read while it runs, and a grandchild cannot hold a pipe open.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=env,
            cwd=cwd,
            start_new_session=os.name != "nt",  # so that what it starts can be ended with it
        )

    def finish(self, timeout_seconds: float) -> Outcome:
        """Wait for the end, or end it, whatever happens to us meanwhile."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self._end()
        return Outcome(code, _text(self._out), _text(self._err))

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            if os.name == "nt":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_DIE)


def _text(file) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
