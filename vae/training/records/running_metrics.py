"""The steps since the last record: means of losses, speed, and the health of data and trainer.

What reading and decoding cost, and how the processes keep step.
"""

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vae.data.dataset import Batch
from vae.losses.terms import LossTerms
from vae.system.host import MIB
from vae.training.distributed import Distributed

_OPEN = "open_shards"  # a state, not a count


class ProcessNumbers(NamedTuple):
    """What one process has measured since the last record."""

    data_wait_share: float  # of the time: waiting for batches
    sync_share: float  # of the time: waiting for the other processes on the host
    allreduce_share: float  # of the time: waiting for the sums of the gradients
    own_seconds: float  # of a step, without these waits
    out_of_memory: float  # how often memory ran out
    # Counts, whose sums over all processes make the data record.
    images: float = 0.0
    rejected: float = 0.0
    decode_seconds: float = 0.0
    load_seconds: float = 0.0
    disk_bytes: float = 0.0
    remote_bytes: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    open_shards: float = 0.0
    workers: float = 0.0
    steps: float = 0.0


_COUNTS = tuple(ProcessNumbers._field_defaults)

Values = dict[str, Any]  # numbers, and lists with a number of each rank


@dataclass
class Health:
    """What this process has counted since the last record."""

    counts: Counter[str] = field(default_factory=Counter)
    open_shards: dict[int, int] = field(default_factory=dict)  # by decoding process
    steps: int = 0
    sync_seconds: float = 0.0  # in these steps, waiting for the other processes on the host

    def add(self, batch: Batch, sync_seconds: float) -> None:
        """Add a step and its batch."""
        counts: dict[str, Any] = {**batch.counts}
        self.open_shards[counts.pop("worker", 0)] = counts.pop(_OPEN, 0)
        self.counts.update(counts)
        self.counts.update(images=len(batch.images), rejected=len(batch.rejected))
        self.steps += 1
        self.sync_seconds += sync_seconds

    def restarted(self) -> "Health":
        """What the next record begins with."""
        return Health(open_shards=self.open_shards)

    def gathered(
        self, dist: Distributed, seconds: float, wait_share: float, allreduce: float, out_of_memory: int = 0
    ) -> "Gathered":
        """The numbers of all processes, with one exchange.

        `seconds`: of the steps. `wait_share`: of this time, for batches. `allreduce`: seconds of a step.
        `out_of_memory`: how often memory ran out.
        """
        own = seconds / self.steps - self.sync_seconds / self.steps - allreduce
        states = {_OPEN: sum(self.open_shards.values()), "workers": len(self.open_shards)}
        counts = Counter(self.counts) + Counter({**states, "steps": self.steps})
        numbers = ProcessNumbers(
            data_wait_share=wait_share,
            sync_share=self.sync_seconds / seconds,
            allreduce_share=allreduce * self.steps / seconds,
            own_seconds=max(0.0, own),
            out_of_memory=out_of_memory,
            **{name: float(counts[name]) for name in _COUNTS},
        )
        return Gathered(seconds, [ProcessNumbers(*row) for row in dist.all_gather_scalars(*numbers)])


@dataclass(frozen=True)
class Gathered:
    """The numbers of each process, by rank."""

    seconds: float
    processes: list[ProcessNumbers]

    def total(self) -> dict[str, float]:
        """The sums of _COUNTS over all processes."""
        return {name: sum(getattr(process, name) for process in self.processes) for name in _COUNTS}

    def data(self) -> Values:
        """The record `data`: what reading and decoding the images of all processes cost."""
        total = self.total()
        decoded = max(1.0, total["images"] + total["rejected"])
        values = {
            "decode_ms": 1000 * total["decode_seconds"] / decoded,
            "load_ms": 1000 * total["load_seconds"] / decoded,
            "disk_mib_per_second": total["disk_bytes"] / MIB / self.seconds,
            "bad_share": total["rejected"] / decoded,
        }
        if total[_OPEN]:
            values |= {_OPEN: total[_OPEN]}
        if asked := total["hits"] + total["misses"]:
            values["remote_mib_per_second"] = total["remote_bytes"] / MIB / self.seconds
            values["cache_hit_rate"] = total["hits"] / asked
        return values

    def out_of_memory(self) -> int:
        """How often memory ran out on all processes."""
        return int(sum(process.out_of_memory for process in self.processes))

    def comparison(self) -> dict[str, float | list[float]]:
        """How several processes keep step; nothing for one.

        All wait for the slowest one. What even the process with the shortest waits waits for is the network.
        """
        if len(self.processes) == 1:
            return {}
        waits = [min(1.0, process.sync_share + process.allreduce_share) for process in self.processes]
        own = [process.own_seconds for process in self.processes]
        slowest = max(own)
        rates = [
            # 0: not known, see `gathered`
            process.images / (process.steps * process.own_seconds) if process.own_seconds else 0.0
            for process in self.processes
        ]
        return {
            "images_per_second_by_rank": [round(rate, 3) for rate in rates],
            "skew_share": statistics.fmean(waits) - min(waits),
            "slowest_rank": own.index(slowest),
            "slowest_to_median": slowest / max(1e-9, statistics.median(own)),
            "seconds_by_rank": [float(f"{seconds:.4g}") for seconds in own],
            "network_share": min(waits),
            "largest_data_wait_share": max(process.data_wait_share for process in self.processes),
        }


SQUARED_RANGE = 4.0  # of values in [-1, 1], for PSNR from the mean squared error


@dataclass
class RunningMetrics:
    """Sums over the steps since the last record. Tensors stay on the device until the record is written."""

    started: float = field(default_factory=time.perf_counter)
    step_ended: float = field(default_factory=time.perf_counter)
    wait_seconds: float = 0.0  # for batches
    pause_seconds: float = 0.0  # for validations, samples and checkpoints
    images: float = 0.0  # of all processes
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # over the images of this process
    norms: list[torch.Tensor] = field(default_factory=list)  # gradient norms of the last step
    health: Health = field(default_factory=Health)

    def add(self, sums: dict[str, torch.Tensor], images: float, norms: list[torch.Tensor]) -> None:
        """Add one step's sums over images."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.images += images
        self.norms = norms
        self.step_ended = time.perf_counter()

    def exclude_pause(self) -> None:
        """Exclude the time since the last step from the training time."""
        self.pause_seconds += time.perf_counter() - self.step_ended

    def all_reduced_means(self, dist: Distributed) -> dict[str, float]:
        """The mean of each sum over the images of all processes. This synchronizes the device."""
        names = sorted(self.sums)
        stacked = dist.all_reduce(torch.stack([self.sums[name] for name in names]))
        return dict(zip(names, (stacked / max(1.0, self.images)).tolist(), strict=True))

    def seconds(self) -> float:
        """The seconds of training since the last record."""
        return max(1e-9, time.perf_counter() - self.started - self.pause_seconds)

    def speed(self) -> dict[str, float]:
        """images_per_second of all processes, and the share of the time spent waiting for data."""
        seconds = self.seconds()
        return {"images_per_second": self.images / seconds, "data_wait_share": self.wait_seconds / seconds}


def loss_record(means: dict[str, float], terms: LossTerms) -> dict[str, float]:
    """The weighted loss, its terms and the PSNR of the mean squared error, from the means of the steps."""
    mse = means["mse"]
    psnr = 10 * math.log10(SQUARED_RANGE / mse) if 0 < mse < math.inf else math.nan
    shown = {name: value for name, value in means.items() if name != "mse"}
    return {"loss": terms.weighted_sum(means), **shown, "psnr": psnr}
