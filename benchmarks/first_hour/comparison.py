"""Part 7: the ten cases of the comparison with diffusers (benchmarks/run.py)."""

import time
from functools import partial
from typing import Any

from benchmarks.comparison import report
from benchmarks.comparison.cases import CASES, Bench
from benchmarks.comparison.equality import DifferentWorkError, check_same_work
from benchmarks.comparison.measuring import Stopwatch
from benchmarks.first_hour.case import DEVICE, NO_ARITHMETIC, Case, Settings, computes

TITLE = "Speed and memory compared with diffusers"
# By number, the most important case first; planned for an H200.
SECONDS = {2: 150, 3: 60, 9: 30, 7: 15, 8: 15, 10: 20, 1: 30, 6: 60, 4: 60, 5: 40}


def cases(settings: Settings) -> list[Case]:
    """The check that both sides do the same work, then the cases."""
    return [Case("same work on both sides", 20, _same_work)] + [
        Case(f"{number}. {CASES[number].__doc__}", seconds, partial(_run, number=number))
        for number, seconds in SECONDS.items()
    ]


def _same_work(settings: Settings) -> dict[str, Any]:
    try:
        return check_same_work(DEVICE)
    except DifferentWorkError as error:
        if computes():
            raise
        return {"verdict": NO_ARITHMETIC, "error": str(error)}


def _run(settings: Settings, number: int) -> dict[str, Any]:
    compiled = min(settings.deadline, time.monotonic() + SECONDS[number])  # later ones do not start
    stopwatch = Stopwatch(DEVICE, 1 if settings.quick else 3, compiled)
    bench = Bench(stopwatch, "small" if settings.quick else "large", compile=not settings.quick)
    return report.run_case(bench, number)


table = report.tables
