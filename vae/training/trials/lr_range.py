"""The arithmetic of a learning rate range test (Smith 2017): rates, the smoothed loss, suggested rates.

The rate rises geometrically, and the loss of each batch is measured before its step. Batches differ more than
the loss falls, so each loss is divided by that of the unchanged weights for the same batch.
Two rates are common choices: where this ratio falls fastest, and a tenth of the rate at which it is lowest.
"""

import math
from typing import NamedTuple

import numpy as np

LOWEST, HIGHEST = 1e-7, 1.0  # learning rates
SMOOTHING = 0.9  # decay of the mean over steps
DIVERGED = 4.0  # the loss is so many times that of the unchanged weights


class Curve(NamedTuple):
    """The loss of each batch before the step with its learning rate; it ends where training diverges."""

    seed: int
    rates: list[float]
    losses: list[float]
    unchanged: list[float]  # losses of the same batches with the weights before the first step

    def smoothed(self) -> np.ndarray:
        """loss / unchanged: its geometric mean up to each step, with exponentially falling weights (S,)."""
        mean, found = 0.0, []
        for step, (loss, unchanged) in enumerate(zip(self.losses, self.unchanged, strict=True), 1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * math.log(loss / unchanged)
            found.append(mean / (1 - SMOOTHING**step))
        return np.exp(found)


class Suggestion(NamedTuple):
    """Two usual choices of a learning rate."""

    steepest: float  # where the smoothed loss falls fastest, at most half of the rate at which it is lowest
    tenth: float  # of the rate at which the smoothed loss is lowest


def has_diverged(loss: float, unchanged: float) -> bool:
    """Whether the loss of a batch shows that the test is over; true for NaN."""
    return not loss < DIVERGED * unchanged


def suggest(curve: Curve) -> Suggestion:
    """The rates that a curve suggests."""
    smoothed, rates = curve.smoothed(), np.array(curve.rates)
    lowest = max(1, int(smoothed.argmin()))
    slopes = np.gradient(np.log(smoothed[: lowest + 1]))
    safe = max(1, int((rates[:lowest] <= rates[lowest] / 2).sum()))
    return Suggestion(float(rates[slopes[:safe].argmin()]), float(rates[lowest] / 10))
