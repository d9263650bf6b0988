"""Signals set flags that the training loop reads: stop after this step, or save a checkpoint."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vae.system import console
from vae.system.errors import EXIT_INTERRUPTED

# What a stop signal prints, for each part of a run.
LOADING = "finishing loading and the first step, then saving"
MEASURING = "stopping after this step: training has not started"
STEP = "finishing this step, then saving"
VALIDATION = "finishing this validation and one more step, then saving"
LAST_VALIDATION = "finishing this validation and the export"
EXPORT = "finishing the export"

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
    ignored.
    """

    def __init__(self, is_main_process: bool = True) -> None:
        self.stop = False
        self.save = False
        self.answer = LOADING  # what a stop signal prints
        self._is_main_process = is_main_process
        self._stopped_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (getattr(signal, name) for name in _STOP_SIGNALS):
            if number != _HANGUP or signal.getsignal(number) != signal.SIG_IGN:
                self._install(number, self._on_stop)
        if hasattr(signal, "SIGUSR1"):
            self._install(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def answering(self, answer: str) -> Iterator[None]:
        """Within this context, `answer` describes how a stop signal is handled."""
        before, self.answer = self.answer, answer
        try:
            yield
        finally:
            self.answer = before

    def check_loading(self) -> None:
        """Raise LoadingStoppedError if a stop signal came LOADING_SECONDS ago; for a wait.

        An export is finished in any case.
        """
        if self.stop and self.answer != EXPORT and time.monotonic() - self._stopped_at >= LOADING_SECONDS:
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
            console.error_from_signal_handler(f"{self.answer}; press Ctrl-C again to exit now")

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True
