"""Decide from the log records whether training diverges, and which checkpoint is known to be good.

All values are means over the steps of a record and over all processes, so every process decides the same.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vae.system.errors import NonFiniteError
from vae.training.distributed import Distributed

# Ordinary records of 60 runs (tiny to 80 M parameters, 1 to 10 steps per record, adversarial starts and stage
# changes among them) stayed below 1.3 times the highest loss of the window: docs/reliability.md.
WINDOW = 64  # records
MIN_RECORDS = 16  # before the first comparison; the median of as many is the level of the loss
MAX_FACTOR = 2.0  # times the highest loss of the window
MAX_Z = 8.0  # robust z-score of the logarithm of the loss
MAD_TO_STD = 1.4826  # of a normal distribution
MIN_SPREAD = 0.1  # of this logarithm: a smooth curve needs a factor of exp(8 x 0.1) = 2.2 over its median
# An ordinary batch may be hard: a spike must last for several records and steps.
SPIKE_RECORDS = 2
SPIKE_STEPS = 20
MAX_MSE = 4.0  # that of a black image for a white one, in [-1, 1]: no output in range is worse


NOT_FINITE = "the weights are not finite"


def raise_if_diverged(dist: Distributed, reason: str | None) -> None:
    """Raise NonFiniteError on all processes, if one has a reason."""
    if dist.all_reduce_scalars(reason is not None)[0]:
        raise NonFiniteError(reason or "training has diverged on another process")


def spike_threshold(losses: Sequence[float]) -> float:
    """Return the loss above which a record is a spike after these losses; infinite after a few."""
    if len(losses) < MIN_RECORDS:
        return math.inf
    logs = [math.log(max(loss, 1e-30)) for loss in losses]
    # Differences between neighbours: the fall of the loss over the window is no spread.
    changes = [abs(after - before) for before, after in itertools.pairwise(logs)]
    spread = MAD_TO_STD / math.sqrt(2) * statistics.median(changes)
    level = statistics.median(logs[-MIN_RECORDS:])
    return math.exp(max(level + MAX_Z * max(spread, MIN_SPREAD), max(logs) + math.log(MAX_FACTOR)))


@dataclass
class Stability:
    """Judges the records of a run: whether it diverges, and which checkpoint is good. Not in checkpoints."""

    max_nonfinite_steps: float = math.inf  # --max_nonfinite_steps
    losses: list[float] = field(default_factory=list)  # of ordinary records, the newest last
    reference: float | None = None  # in an adversarial phase, their median before it
    first_step: int = 0  # after which this command, or its present stage, began
    last_record: int = 0  # its step
    spike_records: int = 0  # in a row
    spike_steps: int = 0  # in these records
    spike: str = ""  # the last of them, in words
    out_of_range: bool = False  # whether its mean squared error was above MAX_MSE
    nonfinite_streak: int = 0  # steps in a row without a finite gradient, at the last record
    good: Path | None = None  # the newest checkpoint after which a whole ordinary record followed
    # Steps and paths of newer ones; a thread that has written one appends it.
    unconfirmed: list[tuple[int, Path]] = field(default_factory=list)

    def begin_stage(self) -> None:
        """Forget the losses: those of another image size cannot be compared."""
        self.first_step = self.last_record
        self.losses = []
        self.reference = None
        self.spike_records = 0
        self.spike_steps = 0

    def begin_phase(self, is_adversarial: bool) -> None:
        """Begin the adversarial phase, or end it."""
        known = is_adversarial and self.losses
        self.reference = statistics.median(self.losses[-MIN_RECORDS:]) if known else None

    def needed(self) -> set[str]:
        """Return the checkpoints that pruning keeps: the good one, and the next one to be judged."""
        candidates = [path for saved, path in list(self.unconfirmed) if saved <= self.last_record]
        return {path.name for path in (self.good, *candidates[-1:]) if path is not None}

    def add_record(self, step: int, loss: float, mse: float, nonfinite_streak: int = 0) -> bool:
        """Add the record of the steps up to `step`; returns whether a newer checkpoint is good now.

        `nonfinite_streak`: steps in a row up to this one that were skipped because a gradient was not finite;
        their number is counted on the device. Such a loss is neither ordinary nor a spike.
        """
        first_step = self.last_record
        self.last_record = step
        self.nonfinite_streak = nonfinite_streak
        if nonfinite_streak or not math.isfinite(loss):
            return False
        if spike := self._spike(loss, mse):
            self.spike = spike
            self.spike_records += 1
            self.spike_steps += step - first_step
            self.out_of_range = mse > MAX_MSE
            return False
        self.losses = [*self.losses, loss][-WINDOW:]
        self.spike_records = self.spike_steps = 0
        confirmed = [entry for entry in list(self.unconfirmed) if entry[0] <= first_step]
        for entry in confirmed:
            self.unconfirmed.remove(entry)
            self.good = entry[1]
        return bool(confirmed)

    def _spike(self, loss: float, mse: float) -> str:
        """Return in which way a record is out of the ordinary; "" if it is not.

        The weights that train may collapse in an adversarial phase a hundred steps before their EMA shows it.
        """
        if mse > MAX_MSE:
            return f"mean squared error {mse:.3g}, but that of black for white is {MAX_MSE:g}"
        if self.reference is not None and loss > MAX_FACTOR * self.reference:
            return (
                f"{loss:.3g}, but {self.reference:.3g} before the adversarial loss began, so lower "
                "--adversarial_weight"
            )
        if loss > spike_threshold(self.losses):
            return f"{loss:.3g}, before at most {max(self.losses):.3g}"
        return ""

    def divergence(self) -> str | None:
        """Return why training has diverged: many steps were not finite, or a spike lasts; else None."""
        if self.nonfinite_streak >= self.max_nonfinite_steps:
            return (
                f"{self.nonfinite_streak} steps in a row had a non-finite gradient "
                f"(--max_nonfinite_steps {self.max_nonfinite_steps})"
            )
        lasts = self.spike_records >= SPIKE_RECORDS and self.spike_steps >= SPIKE_STEPS
        return f"the loss has jumped for {self.spike_steps} steps: {self.spike}" if lasts else None

    def at_end(self, step: int, nonfinite_streak: int) -> str | None:
        """Return why a stage that ends with this step has diverged; None if it has not.

        It has, too, if its outputs are out of range, or if no step of this command has changed the weights.
        """
        if self.spike_records and self.out_of_range:
            return f"the loss has jumped for {self.spike_steps} steps: {self.spike}"
        if 0 < step - self.first_step <= nonfinite_streak:
            return f"none of the {step - self.first_step} steps had a finite gradient"
        return self.divergence()

    def doubt(self, nonfinite_streak: int) -> str | None:
        """Return why training may be diverging after so many non-finite steps in a row; None if it is not."""
        if nonfinite_streak:
            return f"the last {nonfinite_streak} steps were not finite"
        return f"the loss has just jumped: {self.spike}" if self.spike_records else None

    def begin(self, step: int, checkpoint: Path | None) -> None:
        """Begin at a step, with the weights of a checkpoint that the first record judges."""
        self.first_step = self.last_record = step
        self.spike_records = self.spike_steps = self.nonfinite_streak = 0
        self.unconfirmed = [(step, checkpoint)] if checkpoint else []
