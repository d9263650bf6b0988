"""Progress of long work: a bar on a terminal, and a plain line from time to time in a log file."""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from tqdm import TqdmWarning, tqdm

from vae.system import console

SECONDS_BETWEEN_LINES = 30.0
Item = TypeVar("Item")


class Progress:
    """Progress through `total` units of work on stderr, as a context manager.

    The main process shows a bar on a terminal or in a notebook, which disappears at the end unless `keep`.
    Anything else, such as a log file, gets a plain line at round numbers, at most every 30 seconds. A last
    line is printed if the work is complete, and if `keep` or an earlier line was printed. `scaled` prints
    large numbers with SI prefixes, and the unit "%" prints them in percent of `total`.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        unit: str,
        *,
        done: int = 0,
        keep: bool = True,
        scaled: bool = False,
    ):
        self.description, self.total, self.unit = description, total, unit
        self.done, self.done_before = done, done
        self.round_by = 1 if total is None else 10 ** (len(str(total // 10)) - 1)  # 10 for a total of 400
        self.keep, self.scaled = keep, scaled
        self.note = ""
        self.has_printed = False
        self.started = self.printed_at = time.monotonic()
        self.bar: tqdm | None = None
        if console.is_terminal(sys.stderr) and console.shows_progress():
            in_percent = "{l_bar}{bar}| {elapsed}<{remaining}" if unit == "%" else None
            self.bar = _bar_class()(
                total=total, initial=done, desc=description, unit=unit, unit_scale=scaled, leave=keep,
                dynamic_ncols=True, smoothing=0.05, bar_format=in_percent,
            )  # fmt: skip

    def update(self, count: int = 1, note: str | None = None) -> None:
        """Count finished units; `note` is shown beside the number from now on."""
        self.done += count
        self.note = self.note if note is None else note
        if self.bar is not None:
            self.bar.set_postfix_str(self.note, refresh=False)
            self._draw(lambda bar: bar.update(count))
            return
        is_round = self.done // self.round_by > (self.done - count) // self.round_by
        is_due = time.monotonic() - self.printed_at >= SECONDS_BETWEEN_LINES
        if is_round and is_due and self.done != self.total:
            self._print(self._remaining())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self._draw(lambda bar: bar.close())
        elif kind is None and (self.keep or self.has_printed):
            self._print(f"took {tqdm.format_interval(self._seconds())}")

    def _draw(self, change: Callable[[tqdm], object]) -> None:
        """Change the bar; a terminal that was closed shows nothing any more."""
        assert self.bar is not None
        try:
            change(self.bar)
        except OSError:
            console.discard(sys.stderr)

    def _print(self, ending: str) -> None:
        """Print a line such as `validate: 120 of 400 images, 3 bad, 12.5 images/s, 00:22 left`."""
        self.has_printed = True
        self.printed_at = time.monotonic()
        number = tqdm.format_sizeof if self.scaled else str
        total = "" if self.total is None else f" of {number(self.total)}"
        numbers = f"{number(self.done)}{total} {self.unit}s"
        speed = self._speed(number)
        if self.unit == "%" and self.total:
            numbers = f"{100 * self.done // self.total} %"
            speed = ""
        parts = [f"{self.description}: {numbers}", self.note, speed, ending]
        console.progress(", ".join(filter(None, parts)))

    def _speed(self, number: Callable[[float], str]) -> str:
        """Units per second, or seconds per unit if there is less than one per second."""
        rate = self._rate() if self._seconds() >= 1 else 0.0
        if 0 < rate < 1:
            return f"{number(round(1 / rate, 1))} s/{self.unit}"
        return f"{number(round(rate, 1))} {self.unit}s/s" if rate else ""

    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _rate(self) -> float:
        return (self.done - self.done_before) / self._seconds()

    def _remaining(self) -> str:
        if self.total is None or self.done == self.done_before:
            return ""
        return f"{tqdm.format_interval((self.total - self.done) / self._rate())} left"


def _bar_class() -> type[tqdm]:
    """tqdm's bar for this place: in a notebook with ipywidgets, a widget."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # ipywidgets is missing: a bar of text is as good
        from tqdm.auto import tqdm as bar
    return bar


def track(
    items: Iterable[Item], description: str, total: int | None, unit: str, *, keep: bool = True
) -> Iterator[Item]:
    """The items, with the progress of the loop over them."""
    with Progress(description, total, unit, keep=keep) as progress:
        for item in items:
            yield item
            progress.update()
