"""Commands that a launcher runs: a signal that ends the launcher also ends the command and its children.

Needs only the standard library.
"""

import signal
from types import FrameType
from typing import Any, NoReturn

from vae.system import child_process
from vae.system.errors import EXIT_INTERRUPTED


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
    signal.signal(number, signal.SIG_IGN)  # cleaning up takes child_process.SECONDS_TO_END at most
    raise Stopped(number)


def exit_code_of(error: BaseException) -> int:
    """The launcher's exit code after Stopped, Ctrl-C or the end of its input."""
    return 128 + error.number if isinstance(error, Stopped) else EXIT_INTERRUPTED


def run_command(command: list[str], **options: Any) -> int:
    """Run a command with options of subprocess.Popen; returns its exit code.

    If a signal ends the wait, the command and the processes that it has started get the same signal.
    """
    process = child_process.start(command, **options)
    try:
        return process.wait()
    except KeyboardInterrupt as error:
        child_process.end(process, error.number if isinstance(error, Stopped) else signal.SIGINT)
        raise
