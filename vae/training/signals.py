"""Signals as requests: finish the step, save, and leave; or save and go on."""

import os
import signal
import time
from types import FrameType

from vae.config.errors import EXIT_INTERRUPTED

# torchrun forwards the SIGTERM that a scheduler has already sent to every process: one wish, not two.
_SAME_WISH_SECONDS = 0.5
_STOP = [name for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name)]


class StopSignals:
    """While entered, SIGTERM, SIGINT and CTRL_BREAK set `stop`, SIGUSR1 sets `save`.

    Another stop, more than _SAME_WISH_SECONDS after the first, leaves at once.

    Handlers only set flags: the loop reads them between steps.
    """

    def __init__(self):
        self.stop = False
        self.save = False
        self._asked_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for name in _STOP:
            self._install(getattr(signal, name), self._on_stop)
        if hasattr(signal, "SIGUSR1"):
            self._install(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _install(self, number: int, handler) -> None:
        self._before[number] = signal.signal(number, handler)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self.stop and time.monotonic() - self._asked_at < _SAME_WISH_SECONDS:
            return
        if self.stop:
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)
        self._asked_at = time.monotonic()
        self.stop = True

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True
