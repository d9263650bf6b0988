"""The health of a run beside its losses: what reading and decoding cost, and how the processes keep step.

The budget is what each part of the input path must deliver so that the steps never wait.
"""

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vae.data.dataset import Batch
from vae.system.host import MIB
from vae.training.distributed import Distributed

_OPEN = "open_shards"  # a state, not a count

MB = 1e6
NEARLY = 0.95  # of a rate: speeds of a few steps vary that much


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


class Part(NamedTuple):
    """A part of the input pipeline, of all processes together."""

    name: str
    unit: str
    needed: float
    delivered: float | None  # None: not measured

    def line(self) -> str:
        """The part as a line of the budget."""
        needed = f"  {self.name:<9} must deliver {_rate(self.needed)} {self.unit}"
        if self.delivered is None:
            return needed
        late = ": it waits for images" if self.name == "step" else ": too slow"
        verdict = "" if self.delivered >= NEARLY * self.needed else late
        return f"{needed}, delivers {_rate(self.delivered)}{verdict}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def budget_parts(
    total: Mapping[str, float], seconds: float, wait_share: float, image_bytes: int, copy_rate: float | None
) -> list[Part]:
    """The parts, from the sums over all processes of what vae.training.records.health counts in `seconds`.

    `wait_share`: of this time, for images. `image_bytes`: of the pixels of a crop. `copy_rate`: to the
    devices, bytes per second.
    """
    images = max(1.0, total["images"])
    rate = images / (seconds * max(1e-3, 1 - wait_share))  # of the steps, if images never made them wait
    read = total["disk_bytes"] + total["remote_bytes"]
    reading = max(1e-9, (total["load_seconds"] - total["decode_seconds"]) / max(1.0, total["workers"]))
    decoding = max(1e-9, total["decode_seconds"] / max(1.0, total["workers"]))
    hits = total["hits"]  # what the store gives meanwhile is for later images too
    needed = rate * (total["disk_bytes"] / hits if hits else read / images) / MB
    parts = []
    if total["remote_bytes"]:  # until the cache, which fetches ahead, has all shards
        parts.append(Part("store", "MB/s", needed, total["remote_bytes"] / seconds / MB))
    if read:
        name = "cache" if total["hits"] + total["misses"] else "disk"
        parts.append(Part(name, "MB/s", needed, total["disk_bytes"] / reading / MB))
    parts.append(Part("decoding", "images/s", rate, images / decoding))
    if copy_rate is not None:
        parts.append(Part("copy", "MB/s", rate * image_bytes / MB, copy_rate / MB))
    return [*parts, Part("step", "images/s", rate, images / seconds)]
