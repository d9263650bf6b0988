"""What all parts share: settings, cases, timing, child processes, and verdicts."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = torch.device("cuda", 0)
NO_ARITHMETIC = "no arithmetic"  # the verdict on numbers of a device that computes nothing
CARD_GIB = 30.3  # what a step may use on a card with 32 GB: docs/results.md, the table of --plan


@dataclass(frozen=True)
class Settings:
    """How the parts run."""

    out: Path
    quick: bool  # small sizes, to try the program
    data_path: str | None
    deadline: float = math.inf  # of time.monotonic()

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Case:
    """One measurement; it does not start if less than `seconds`, its time on an H100, are left."""

    name: str
    seconds: float
    run: Callable[[Settings], dict[str, Any]]


@cache
def computes() -> bool:
    """Whether the device computes: a stand-in for a card runs everything but returns no results."""
    numbers = torch.arange(1, 5, device=DEVICE, dtype=torch.float32)
    return numbers.sum().item() == 10 and numbers.square().sum().item() == 30


def verdict(is_right: bool) -> str:
    """The verdict on a numerical comparison."""
    return NO_ARITHMETIC if not computes() else "ok" if is_right else "WRONG"


def seconds_of(run: Callable[[], Any], min_run_time: float = 0.3) -> float:
    """Median time of a run on the card, in seconds."""
    return Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=min_run_time).median


def in_a_process(
    module: str, argument: dict[str, Any], timeout: float, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run `python -m MODULE JSON`; returns the JSON of its last line, raises RuntimeError if it fails."""
    words = [sys.executable, "-m", module, json.dumps(argument)]
    done = run_words(words, timeout, env)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {last_line(done.stderr)}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_words(
    words: list[str], timeout: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder; RuntimeError if it takes longer than `timeout` seconds."""
    environment = {**os.environ, **(env or {})}
    try:
        return subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1.0, timeout)
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished after {timeout:.0f} s") from None


def last_line(text: str) -> str:
    """The last line that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def rounded(number: float, digits: int = 4) -> float:
    """A number with some significant digits, for a file that people read."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else number


def markdown(header: list[str], rows: list[list[Any]]) -> list[str]:
    """A table; None is shown as an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]
