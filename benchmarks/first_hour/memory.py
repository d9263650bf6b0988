"""Part 4: predicted, allocated and reserved memory of the trainer's step on a card with 32 GB."""

import json
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.first_hour.case import CARD_GIB, DEVICE, Case, Settings, in_a_process, markdown, rounded
from benchmarks.first_hour.trainer_step import WARMUP, TrainerStep
from vae.device import is_out_of_memory
from vae.system.gpu_memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS
from vae.system.host import GIB
from vae.system.script import end_process
from vae.training.memory.stage_memory import memory_peaks

TITLE = f"Memory of a step within {CARD_GIB} GiB: predicted, allocated, reserved, retries"
MODULE = "benchmarks.first_hour.memory"
ALLOCATORS = {"expandable": GROWING_SEGMENTS, "default": "expandable_segments:False"}
# (px, images, images per pass, recompute level, CUDA graph): profiles and single images
SHAPES = [
    (1024, 1, 1, "none", False),
    (1024, 1, 1, "none", True),
    (1024, 16, 2, "none", False),
    (2048, 1, 1, "activations", False),
    (2048, 4, 1, "activations", False),
    (2048, 4, 1, "blocks_encoder", False),
    (3840, 1, 1, "all", False),
]
QUICK_SHAPES = [(128, 1, 1, "none", True), (256, 4, 1, "activations", False)]
STEPS = 4  # the first one creates the moments of AdamW and is not counted


def cases(settings: Settings) -> list[Case]:
    """Each is a process of its own, because the allocator is chosen before PyTorch starts."""
    found = []
    for shape in QUICK_SHAPES if settings.quick else SHAPES:
        px, images, micro_batch, level, graph = shape
        for allocator in ALLOCATORS:
            name = f"{px} px, {images} as {-(-images // micro_batch)} x {micro_batch}, {level}"
            name += f"{', CUDA graph' * graph}, {allocator}"
            found.append(
                Case(name, 20 + px**2 * images / 1e6, partial(_run, shape=shape, allocator=allocator))
            )
    return found


def _run(settings: Settings, shape: tuple[int, int, int, str, bool], allocator: str) -> dict[str, Any]:
    px, images, micro_batch, level, graph = shape
    options = {
        "cuda_graph": graph,
        "image_size": px,
        "batch_size": images,
        "micro_batch_size": str(micro_batch),
        "recompute": level,
    }
    env = {name: ALLOCATORS[allocator] for name in ALLOCATOR_VARIABLES}
    argument = {"quick": settings.quick, "options": options}
    return in_a_process(MODULE, argument, settings.seconds_left, env)


def measure(argument: dict[str, Any]) -> dict[str, Any]:
    """GiB of the steps after the first, and how often the allocator had to free its cache and try again."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_GIB * GIB / total), DEVICE)
    step = TrainerStep.prepare(argument["quick"], **argument["options"])
    planned = step.plan.memory
    found: dict[str, Any] = {
        "predicted_gib": rounded((planned.resident + planned.working) / GIB),
        "reserve_of_the_plan_gib": rounded(planned.reserve / GIB),
    }
    try:
        for index in range(STEPS + WARMUP * argument["options"]["cuda_graph"]):
            if index == 1:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_stats()["num_alloc_retries"]
            step()
        torch.cuda.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {**found, "verdict": "OUT OF MEMORY", "error": str(error)[:200]}
    peaks = memory_peaks(DEVICE)
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return {
        **found,
        "allocated_gib": rounded(peaks["memory_peak_gib"]),
        "reserved_gib": rounded(peaks["memory_reserved_gib"]),
        "outside_pytorch_gib": rounded((total - free - torch.cuda.memory_reserved()) / GIB),
        "retries_first_step": before,
        "retries": stats["num_alloc_retries"] - before,
        "micro_batch": step.stepper.retry.settings.micro_batch,  # lower than requested if memory ran out
        "verdict": "ok" if step.stepper.retry.settings.micro_batch == planned.micro_batch else "LOWERED",
    }


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, found in results.items():
        predicted, reserved = found["predicted_gib"], found.get("reserved_gib")
        difference = f"{reserved / predicted - 1:+.1%}" if reserved else None
        figures = [predicted, found.get("allocated_gib"), reserved, difference, found.get("retries")]
        rows.append([name, *figures, found["verdict"]])
    header = ["step", "predicted GiB", "allocated GiB", "reserved GiB", "reserved / predicted", "retries", ""]
    return ["Predicted without the reserve of the plan:", "", *markdown(header, rows)]


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
    end_process(0)
