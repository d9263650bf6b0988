"""Part 5: whether the host keeps the card busy: the time of a step beside the summed time of its kernels."""

from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.first_hour.case import NO_ARITHMETIC, Case, Settings, computes, markdown, rounded, seconds_of
from benchmarks.first_hour.trainer_step import WARMUP, TrainerStep

TITLE = "Time of a step and summed time of its kernels"
SIZES, QUICK_SIZES = (256, 512, 1024, 2048), (64, 128)
STEPS = 2  # profiled


def cases(settings: Settings) -> list[Case]:
    found = []
    for px in QUICK_SIZES if settings.quick else SIZES:
        level = "activations" if px > 1024 else "none"
        for graph in (True, False):
            name = f"{px} px, {'with' if graph else 'without'} CUDA graph"
            options = {"image_size": px, "recompute": level, "cuda_graph": graph}
            found.append(Case(name, 25, partial(_run, options=options)))
    return found


def _run(settings: Settings, options: dict[str, Any]) -> dict[str, Any]:
    step = TrainerStep.prepare(settings.quick, **options)
    for _ in range(WARMUP):
        step()
    wall = seconds_of(step, 2.0 if settings.quick else 8.0)
    found = {"recompute": options["recompute"], "wall_ms": rounded(wall * 1e3)}
    if not computes():
        return {**found, "verdict": NO_ARITHMETIC}  # and no kernels that a profiler could see
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sum(event.self_device_time_total for event in events) / 1e6 / STEPS
    return {
        **found,
        "kernels_ms": rounded(kernels * 1e3),
        "kernels": len(events) // STEPS,
        "busy": rounded(kernels / wall, 3),
    }


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        [name, *(found.get(key) for key in ("recompute", "wall_ms", "kernels_ms", "kernels", "busy"))]
        for name, found in results.items()
    ]
    header = ["step of one image", "recompute", "time, ms", "kernels, ms", "kernels, number", "busy"]
    return markdown(header, rows)
