"""The results of a search as plain data: differences from the defaults, their noise, and the final gain."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vae.config.tune_flags import DIRECTIONS

UNITS = {"psnr": " dB", "ssim": "", "lpips": ""}
DECIMALS = {"psnr": 2, "ssim": 4, "lpips": 4}
# 97.5 % quantiles of Student's t distribution with 1 to 9 degrees of freedom, for 95 % intervals.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class TrialRow:
    """A trial, as trials.jsonl contains it."""

    trial: int
    state: str  # Optuna's: complete, pruned, fail, running
    params: dict[str, Any]
    folder: str = ""
    name: str = ""  # "defaults", the name of a recipe, or empty
    values: dict[str, float] = field(default_factory=dict)  # by objective; those of the last validation
    difference: dict[str, float] = field(default_factory=dict)  # from the defaults, trial 0, at its step
    noise: dict[str, float] = field(default_factory=dict)  # standard deviation between seeds
    steps: int = 0  # optimizer steps
    seconds: float | None = None
    reason: str = ""

    @property
    def settings(self) -> str:
        return " ".join(f"{name}={_short(value)}" for name, value in self.params.items())


class Gain(NamedTuple):
    """The best trial against the defaults, paired by seed; positive means better."""

    objective: str
    default: tuple[float, ...]
    best: tuple[float, ...]

    @property
    def differences(self) -> list[float]:
        return [sign(self.objective) * (b - d) for b, d in zip(self.best, self.default, strict=True)]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        count = len(self.differences)
        return _STUDENT_T[count - 2] * statistics.stdev(self.differences) / math.sqrt(count)

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0."""
        return self.mean > self.half_width

    def __str__(self) -> str:
        digits, unit = DECIMALS[self.objective], UNITS[self.objective]
        low = self.mean - self.half_width
        high = self.mean + self.half_width
        interval = f"{low:+.{digits}f} to {high:+.{digits}f}{unit}, 95 % interval of {len(self.best)} seeds"
        if self.is_shown:
            result = f"the best trial is better by {self.mean:.{digits}f}{unit}"
        elif self.mean < -self.half_width:
            result = f"NO GAIN: the best trial is worse by {-self.mean:.{digits}f}{unit}"
        else:
            result = f"NO GAIN is shown: the difference of {self.mean:+.{digits}f}{unit} may be noise"
        return f"{self.objective}: {result} ({interval})"


def smallest_gain(values: Sequence[float]) -> float:
    """The mean difference that as many repeats as these can show, if equal seeds have nothing in common."""
    return _STUDENT_T[len(values) - 2] * statistics.stdev(values) * math.sqrt(2 / len(values))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "")


def shown(objective: str, value: float) -> str:
    """A value with its unit."""
    return f"{value:.{DECIMALS[objective]}f}{UNITS[objective]}"


def cells(objective: str, row: TrialRow) -> tuple[str, str]:
    """The value of a trial, and its difference from the defaults beside the noise of a single run."""
    value = shown(objective, row.values[objective]) if objective in row.values else "-"
    if objective not in row.difference:
        return value, "-"
    digits, unit = DECIMALS[objective], UNITS[objective]
    noise = f"(noise {row.noise[objective]:.{digits}f})"
    return value, f"{row.difference[objective]:+.{digits}f}{unit} {noise}"


def sign(objective: str) -> int:
    """1 if higher values are better, otherwise -1."""
    return 1 if DIRECTIONS[objective] == "maximize" else -1
