"""Commands that a launcher runs: a signal that ends the launcher also ends the command and its children.

Needs only the standard library.
"""

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any, NoReturn

from vae.system.errors import EXIT_INTERRUPTED

SECONDS_TO_END = 10.0  # between the signal that asks a command to end, and SIGKILL


class Stopped(KeyboardInterrupt):
    """A signal other than Ctrl-C ended the launcher."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def stop_on_signals() -> None:
    """Raise Stopped on SIGTERM and SIGHUP (the terminal was closed), so that the launcher cleans up."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        # Signals that nohup ignores stay ignored, also in the trainer, which replaces this process.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # cleaning up takes SECONDS_TO_END at most
    raise Stopped(number)


def exit_code_of(error: BaseException) -> int:
    """The launcher's exit code after Stopped, Ctrl-C or the end of its input."""
    return 128 + error.number if isinstance(error, Stopped) else EXIT_INTERRUPTED


def run_command(command: list[str], **options: Any) -> int:
    """Run a command with options of subprocess.Popen; returns its exit code.

    If a signal ends the wait, the command and the processes that it has started get the same signal.
    """
    # In a session of its own, the command is the leader of a process group.
    process = subprocess.Popen(command, start_new_session=sys.platform != "win32", **options)
    try:
        return process.wait()
    except KeyboardInterrupt as error:
        _end(process, error.number if isinstance(error, Stopped) else signal.SIGINT)
        raise


def _end(process: subprocess.Popen[Any], number: int) -> None:
    """Ask the process and its children to end, and kill those that do not."""
    try:
        _send(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    finally:  # also after a second signal
        _send(process, getattr(signal, "SIGKILL", signal.SIGTERM))


def _send(process: subprocess.Popen[Any], number: int) -> None:
    with contextlib.suppress(OSError):  # all of them have ended
        if sys.platform != "win32":
            os.killpg(process.pid, number)
        elif number != signal.SIGINT:  # Ctrl-C has reached every process of the console
            process.terminate()
