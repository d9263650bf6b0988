"""Part 7: the ten cases of the comparison with diffusers (benchmarks/run.py)."""

import time
from functools import partial
from typing import Any

from benchmarks.comparison import report
from benchmarks.comparison.cases import CASES, Bench
from benchmarks.comparison.equality import DifferentWorkError, check_same_work
from benchmarks.comparison.goals import judge
from benchmarks.comparison.measuring import Stopwatch
from benchmarks.first_hour.case import DEVICE, NO_ARITHMETIC, Case, Settings, computes, markdown

TITLE = "Speed and memory compared with diffusers"
SECONDS = {1: 30, 2: 150, 3: 60, 4: 60, 5: 40, 6: 60, 7: 15, 8: 15, 9: 30, 10: 20}  # on an H200, planned


def cases(settings: Settings) -> list[Case]:
    """The check that both sides do the same work, then the cases; the most important ones first."""
    order = (2, 3, 9, 7, 8, 10, 1, 6, 4, 5)
    found = [Case("same work on both sides", 20, _same_work)]
    return found + [Case(_name(number), SECONDS[number], partial(_run, number=number)) for number in order]


def _name(number: int) -> str:
    return f"{number}. {CASES[number].__doc__}"


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
    result = CASES[number](bench)
    result["goals"] = judge(number, result, gpu=True)
    if number == 2:
        result |= report.fraction_of_peak(result, *report.gpu_name_and_gib(DEVICE))
    return result


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, found in results.items():
        for goal in found.get("goals", []):
            met = "met" if goal["met"] else f"missed; reached if {goal['reached_if']}"
            rows.append([name, goal["what"], goal["found"], goal["goal"], met])
    lines = markdown(["case", "ratio", "found", "goal", ""], rows)
    times = []
    for name, found in results.items():
        for contestant, row in found.get("contestants", {}).items():
            peak = row.get("allocated_bytes")
            gib = f"{peak / 2**30:.2f}" if peak is not None else None
            times.append([name, contestant, row.get("seconds", row.get("failure")), gib])
    return [*lines, "", *markdown(["case", "contestant", "seconds", "peak GiB"], times)]
