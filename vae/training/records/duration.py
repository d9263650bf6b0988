"""How long a stage takes: expected after its first steps, and again if that changes."""

import time
from dataclasses import dataclass, field

MIN_SECONDS = 5.0  # of measured steps before the first estimate
CHANGE = 1 / 3  # of the expected duration; a smaller change is not printed
MINUTE, HOUR = 60.0, 3600.0  # seconds


@dataclass
class StageDuration:
    """Expects the duration of a stage from the wall-clock time of its steps so far.

    The time includes validations and checkpoints. The first step is not measured: it compiles kernels and
    allocates memory. Times are those of a clock, in seconds.
    """

    marks: list[tuple[int, float]] = field(default_factory=list)  # (step, time), about the last half of all
    first: tuple[int, float] | None = None
    expected: float | None = None  # seconds from the first mark to the end of the stage, as last printed

    def needs_mark(self, now: float) -> bool:
        """Whether the first mark or the first estimate is due; later ones follow the log records."""
        return self.first is None or (self.expected is None and now - self.first[1] >= MIN_SECONDS)

    def add(self, step: int, now: float, steps_left: int) -> float | None:
        """Add a mark after `step`; returns the expected seconds until the end if they should be printed."""
        self.marks.append((step, now))
        if self.first is None:
            self.first = step, now
            return None
        first_step, started = self.first
        while len(self.marks) > 2 and 2 * (self.marks[1][0] - first_step) <= step - first_step:
            del self.marks[0]
        old_step, old_time = self.marks[0]
        if now - started < MIN_SECONDS or step == old_step or steps_left == 0:
            return None
        left = (now - old_time) / (step - old_step) * steps_left
        total = now - started + left
        if self.expected is not None and abs(total / self.expected - 1) < CHANGE:
            return None
        self.expected = total
        return left


def duration_line(seconds: float, now: float) -> str:
    """The line about a stage that ends `seconds` after the Unix time `now`; its end is a local time."""
    begins = time.localtime(now)
    ends = time.localtime(now + seconds)
    shown = "%H:%M" if begins[:3] == ends[:3] else "%Y-%m-%d %H:%M"
    return f"stage: about {duration_text(seconds)}, until {time.strftime(shown, ends)}"


def duration_text(seconds: float) -> str:
    """A duration to about a hundredth: 40 s, 12 min, 3 h 20 min, 2 days 5 h."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / MINUTE)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / HOUR), 24)
    return f"{days} days {hours} h" if hours else f"{days} days"
