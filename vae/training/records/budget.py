"""What each part of the input path must deliver so that the steps never wait, and what it delivers."""

from collections.abc import Mapping
from typing import NamedTuple

MB = 1e6
NEARLY = 0.95  # of a rate: speeds of a few steps vary that much


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
