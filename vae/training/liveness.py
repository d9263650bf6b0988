"""Signals that ask a run to stop or save, and a watchdog, which ends a run without progress.

`Liveness` is what every long part of a run owes to the outside: signs of life, and an answer to signals.
"""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from vae.system import console
from vae.system.errors import EXIT_FAILED, EXIT_INTERRUPTED

ANSWER = "stopping: the step, validation or export under way is finished first, then saved"
# A scheduler may send SIGTERM to every process, and torchrun forwards its own copy: that is one request.
_DUPLICATE_SECONDS = 0.5
# A wait for images ends this long after a stop signal. Containers are killed 10 s after it, jobs after 30 s.
LOADING_SECONDS = 5.0
_STOP_SIGNALS = [name for name in ("SIGTERM", "SIGINT", "SIGBREAK", "SIGHUP") if hasattr(signal, name)]
_HANGUP = getattr(signal, "SIGHUP", None)  # the terminal was closed; Windows has none

_Handler = Callable[[int, FrameType | None], Any]


class LoadingStoppedError(Exception):
    """A signal has asked to stop, and the images of the next step, or other processes, do not arrive."""


class StopSignals:
    """A context in which SIGTERM, SIGINT, CTRL_BREAK and SIGHUP set `stop`, and SIGUSR1 sets `save`.

    Handlers only set flags, which the loop reads between steps, and print what happens until the process
    exits. A second stop signal more than _DUPLICATE_SECONDS after the first exits the process at once, except
    for SIGHUP: the shell and the system each send it when a terminal closes. An ignored SIGHUP (nohup) stays
    ignored. No effect outside of the main thread: Python calls handlers there only.
    """

    def __init__(self, is_main_process: bool = True) -> None:
        self.stop = False
        self.save = False
        self.exports = False  # an export is finished in any case
        self._is_main_process = is_main_process
        self._stopped_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (getattr(signal, name) for name in _STOP_SIGNALS):
            if number != _HANGUP or signal.getsignal(number) != signal.SIG_IGN:
                self._install(number, self._on_stop)
        if hasattr(signal, "SIGUSR1"):
            self._install(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def check_loading(self) -> None:
        """Raise LoadingStoppedError if a stop signal came LOADING_SECONDS ago; for a wait."""
        if self.stop and not self.exports and time.monotonic() - self._stopped_at >= LOADING_SECONDS:
            raise LoadingStoppedError

    def _install(self, number: int, handler: _Handler) -> None:
        self._previous_handlers[number] = signal.signal(number, handler)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        repeated = number == _HANGUP or time.monotonic() - self._stopped_at < _DUPLICATE_SECONDS
        if self.stop and repeated:
            return
        if self.stop:
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)
        self._stopped_at = time.monotonic()
        self.stop = True
        if self._is_main_process:
            console.error_from_signal_handler(f"{ANSWER}; press Ctrl-C again to exit now")

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True


CHECK_SECONDS = 1.0
SAVE_SECONDS = 600.0  # for the last checkpoint: a disk that hangs must not keep the process alive


class Watchdog:
    """A context in which every process must `beat` at least every `minutes`; 0: it only counts as a context.

    After a hang, `save_alone` saves on the main process, and the process exits without its main thread.
    """

    def __init__(self, minutes: float, resume_command: str, rank: int = 0) -> None:
        self.save_alone: Callable[[], str | None] = lambda: None  # saves; returns the name of the checkpoint
        self._minutes = minutes
        self._resume_command = resume_command
        self._rank = rank
        self._beats = 0
        self._waits_for_images = False
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._minutes:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def beat(self, waits_for_images: bool = False) -> None:
        """Report progress, or only a wait for images, which a disk may cause."""
        self._waits_for_images = waits_for_images
        self._beats += not waits_for_images

    def _watch(self) -> None:
        seen, silent = -1, 0.0
        while not self._ended.wait(CHECK_SECONDS):
            if seen != self._beats:
                seen, silent = self._beats, 0.0
            # Not by a clock: a process that was paused, for example by Ctrl-Z, does not hang.
            silent += CHECK_SECONDS
            if silent >= 60 * self._minutes:
                with suppress(OSError):  # stderr is closed
                    faulthandler.dump_traceback(2)
                if self._rank:  # the main process saves first
                    time.sleep(SAVE_SECONDS)
                self._exit()

    def _exit(self) -> None:
        """End the process without its main thread, which does not react."""
        saved: list[str | None] = []
        saving = threading.Thread(target=lambda: saved.append(self.save_alone()), daemon=True)
        saving.start()
        saving.join(SAVE_SECONDS)
        remedy = "raise it if a micro-batch takes this long"
        if self._waits_for_images:
            remedy = "images do not arrive, check the disk or share of --data_path"
        result = f"{saved[0]} is saved" if saved and saved[0] else "nothing new is saved"
        console.error_from_signal_handler(
            f"train_vae.py: no progress for {self._minutes:g} minutes (--hang_minutes {self._minutes:g}), "
            f"the stacks of all threads are above: {remedy}; {result}; resume with: {self._resume_command}"
        )
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(EXIT_FAILED)


@dataclass(frozen=True)
class Liveness:
    """The watchdog and the signals of a run."""

    watchdog: Watchdog
    signals: StopSignals

    def beat(self) -> None:
        """Report progress."""
        self.watchdog.beat()

    def check(self) -> None:
        """Called during a wait for images: ends it by an exception, LOADING_SECONDS after a stop signal."""
        self.watchdog.beat(waits_for_images=True)
        self.signals.check_loading()
