"""The health of a run beside its losses: what reading and decoding cost, and how the processes keep step."""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vae.data.dataset import Batch
from vae.training.distributed import Distributed

MIB = 2**20
_OPEN = "open_shards"  # a state, not a count
# Of one process since the last record; their sums over all processes make the data record.
_COUNTS = (
    *("images", "rejected", "decode_seconds", "load_seconds"),
    *("disk_bytes", "remote_bytes", "hits", "misses", _OPEN, "workers", "steps"),
)

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
        row = [
            wait_share,
            self.sync_seconds / seconds,
            allreduce * self.steps / seconds,
            max(0.0, own),
            out_of_memory,
        ]
        rows = dist.all_gather_scalars(*row, *(float(counts[name]) for name in _COUNTS))
        return Gathered(seconds, rows)


@dataclass(frozen=True)
class Gathered:
    """A row of numbers of each process."""

    seconds: float
    rows: list[list[float]]

    def total(self) -> dict[str, float]:
        """The sums of _COUNTS over all processes."""
        return dict(zip(_COUNTS, map(sum, zip(*self._counts(), strict=True)), strict=True))

    def _counts(self) -> list[list[float]]:
        return [row[-len(_COUNTS) :] for row in self.rows]

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
        return int(sum(row[4] for row in self.rows))

    def processes(self) -> dict[str, float | list[float]]:
        """How several processes keep step; nothing for one.

        All wait for the slowest one. What even the process with the shortest waits waits for is the network.
        """
        if len(self.rows) == 1:
            return {}
        for_images, syncs, reduces, own = list(zip(*self.rows, strict=True))[:4]
        waits, slowest = [min(1.0, sum(pair)) for pair in zip(syncs, reduces, strict=True)], max(own)
        counts = [dict(zip(_COUNTS, row, strict=True)) for row in self._counts()]
        rates = [
            count["images"] / (count["steps"] * seconds) if seconds else 0.0  # 0: not known, see `gathered`
            for count, seconds in zip(counts, own, strict=True)
        ]
        return {
            "images_per_second_by_rank": [round(rate, 3) for rate in rates],
            "skew_share": statistics.fmean(waits) - min(waits),
            "slowest_rank": own.index(slowest),
            "slowest_to_median": slowest / max(1e-9, statistics.median(own)),
            "seconds_by_rank": [float(f"{seconds:.4g}") for seconds in own],
            "network_share": min(waits),
            "largest_data_wait_share": max(for_images),
        }
