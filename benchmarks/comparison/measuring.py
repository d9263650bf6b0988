"""Seconds and bytes of contestants that do the same work: interleaved, warmed up, median of repeats.

On a CPU all contestants are built and then run in turn (A B A B ...), so that other load affects all of them
equally. With one thread the clock is the CPU time of the process, which excludes other programs. On a GPU
each contestant is measured alone, so that the memory peak is its own.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from vae.memory.live_bytes import LiveBytes

Run = Callable[[], Any]
GPU_WARMUP = 3  # algorithm search, first allocations, clocks
SHORT_SECONDS, MOST_ROUNDS = 2.0, 25  # short runs are repeated for about this time


@dataclass
class Contestant:
    """One implementation of the work of a case; `build` prepares it and returns the function to time."""

    name: str
    build: Callable[[], Run]
    optional: bool = False  # skipped after the deadline: compilation takes minutes


@dataclass
class Measured:
    """Seconds of each timed run, and on a GPU the peak bytes, everything included."""

    name: str
    seconds: list[float] = field(default_factory=list)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    failure: str | None = None

    @property
    def side(self) -> str:
        return "ours" if self.name.split()[0] == "ours" else "theirs"

    @property
    def median(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """The entry in the JSON file; unknown values are omitted."""
        found: dict[str, Any] = {"side": self.side}
        if self.seconds:
            found["seconds"] = rounded(self.median)
            found["seconds_least_and_most"] = [rounded(min(self.seconds)), rounded(max(self.seconds))]
            found["repeats"] = len(self.seconds)
        for name in ("allocated_bytes", "reserved_bytes", "failure"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found


@dataclass
class Stopwatch:
    """The device, the minimum number of rounds, and the deadline for the start of optional contestants."""

    device: torch.device
    rounds: int
    deadline: float  # of time.monotonic()
    # Called with what has been measured, after each contestant or each round of all of them
    report: Callable[[Iterable[Measured]], None] = list

    @property
    def clock(self) -> str:
        """The clock: "cpu" time of this process, or "wall" time."""
        return "cpu" if self.device.type == "cpu" and torch.get_num_threads() == 1 else "wall"

    def compare(self, contestants: list[Contestant]) -> dict[str, Measured]:
        """The figures of all contestants by name."""
        gc.collect()
        measure = self._one_by_one if self.device.type == "cuda" else self._interleaved
        skipped = "skipped: the time limit was reached"
        return {c.name: Measured(c.name, failure=skipped) for c in contestants} | measure(contestants)

    def _interleaved(self, contestants: list[Contestant]) -> dict[str, Measured]:
        chosen = [c for c in contestants if not c.optional or time.monotonic() < self.deadline]
        runs = {c.name: c.build() for c in chosen}
        found = {name: Measured(name) for name in runs}
        warmup = [self._seconds(run) for run in runs.values()]
        for _ in range(self._rounds(min(warmup))):
            for name, run in runs.items():
                found[name].seconds.append(self._seconds(run))
            self.report(found.values())
        return found

    def _one_by_one(self, contestants: list[Contestant]) -> dict[str, Measured]:
        found = {}
        for contestant in contestants:
            if contestant.optional and time.monotonic() >= self.deadline:
                continue
            found[contestant.name] = self._alone(contestant)
            self.report([found[contestant.name]])
            gc.collect()
            torch.cuda.empty_cache()
        return found

    def _alone(self, contestant: Contestant) -> Measured:
        measured = Measured(contestant.name)
        try:
            run = contestant.build()
            for _ in range(GPU_WARMUP):
                run()
            torch.cuda.reset_peak_memory_stats(self.device)
            measured.seconds = [self._seconds(run)]
            measured.seconds += [self._seconds(run) for _ in range(self._rounds(measured.median) - 1)]
            measured.allocated_bytes = torch.cuda.max_memory_allocated(self.device)
            measured.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
        except torch.OutOfMemoryError:
            measured.failure = "out of memory"
        return measured

    def _rounds(self, seconds: float) -> int:
        return max(self.rounds, min(MOST_ROUNDS, int(SHORT_SECONDS / max(seconds, 1e-6))))

    def _seconds(self, run: Run) -> float:
        clock = time.process_time if self.clock == "cpu" else time.perf_counter
        self._synchronize()
        start = clock()
        run()
        self._synchronize()
        return clock() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def speed_of_best(measured: dict[str, Measured]) -> dict[str, Any]:
    """Ratio of the best medians, theirs to ours; empty if a side has none."""
    best = {}
    for side in ("ours", "theirs"):
        timed = [m for m in measured.values() if m.side == side and m.seconds]
        if not timed:
            return {}
        best[side] = min(timed, key=lambda m: m.median)
    ratio = best["theirs"].median / best["ours"].median
    return {"speed": round(ratio, 3), "fastest": {side: m.name for side, m in best.items()}}


@contextmanager
def memory_limit(device: torch.device, limit_bytes: int) -> Iterator[None]:
    """On a GPU, limit the memory of this process to `limit_bytes`."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def counted(run: Run) -> dict[str, int]:
    """Peak of live bytes and floating-point operations of `run` on the meta device."""
    with LiveBytes() as counter:
        run()
    return {"counted_bytes": counter.peak, "flops": counter.flops}


def saved_bytes(forward: Run, parameters: list[torch.Tensor]) -> int:
    """Bytes that the graph of `forward` saves for backward, including the input, without parameters."""
    excluded = {parameter.untyped_storage()._cdata for parameter in parameters}
    saved = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage  # a reference, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in saved.values())


# ---- Tables ------------------------------------------------------------------------------------------------
def rounded(number: float, digits: int = 4) -> float:
    """A number with some significant digits, for a file that people read."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else number


def markdown(header: list[str], rows: list[list[Any]]) -> list[str]:
    """A table; None is shown as an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]
