"""The five most expensive operations in a whole step of each side."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.comparison.cases import Bench
from benchmarks.comparison.ours import Ours
from benchmarks.comparison.theirs import BF16, BF16_CHANNELS_LAST, Theirs
from benchmarks.comparison.work import Work

ITEMS = 5


def largest_items(bench: Bench) -> dict[str, Any]:
    """Operations with the largest self time, as fractions of one step of case 2."""
    work = Work(bench.sizes(2))
    sides = {
        "ours activations": lambda: Ours(work, bench.device, recompute="activations"),
        f"diffusers {BF16.name}": lambda: Theirs(work, bench.device, BF16),
        f"diffusers {BF16_CHANNELS_LAST.name}": lambda: Theirs(work, bench.device, BF16_CHANNELS_LAST),
    }
    return {"image_size": work.image_size} | {name: _profile(bench, build) for name, build in sides.items()}


def _profile(bench: Bench, build: Callable[[], Ours | Theirs]) -> list[dict[str, Any]]:
    side = build()
    gpu = bench.device.type == "cuda"
    side.step()
    if gpu:
        torch.cuda.synchronize(bench.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as recorded:
        side.step()
        if gpu:
            torch.cuda.synchronize(bench.device)
    self_time = "self_device_time_total" if gpu else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: getattr(event, self_time), reverse=True)
    total = sum(getattr(event, self_time) for event in events)
    return [
        {
            "item": event.key,
            "seconds": round(getattr(event, self_time) / 1e6, 4),
            "share": round(getattr(event, self_time) / total, 3),
            "calls": event.count,
        }
        for event in events[:ITEMS]
    ]
