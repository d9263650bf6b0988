"""Part 3: the trainer's step waits for the card nowhere."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.first_hour.case import Case, Settings, markdown
from benchmarks.first_hour.trainer_step import WARMUP, TrainerStep

TITLE = 'A step under torch.cuda.set_sync_debug_mode("error")'
STEPS = 3  # after the warm-up: algorithm search, first allocations, compilation and capture may wait


def cases(settings: Settings) -> list[Case]:
    size = 64 if settings.quick else 256
    kinds: dict[str, dict[str, Any]] = {
        "bf16, CUDA graph": {"cuda_graph": True},
        "bf16": {},
        "bf16, recompute all": {"recompute": "all"},
        "fp16": {"use_bf16": False},
        "fp32": {"mixed_precision": False},
        "4 images as 4 x 1": {"batch_size": 4, "micro_batch_size": "1"},
        "adversarial": {"adversarial_weight": 0.5, "disc_start": 0},
        "adversarial, CUDA graph": {"adversarial_weight": 0.5, "disc_start": 0, "cuda_graph": True},
    }
    return [
        Case(name, 20, partial(_run, options={"image_size": size, "cuda_graph": False, **kind}))
        for name, kind in kinds.items()
    ]


def _run(settings: Settings, options: dict[str, Any]) -> dict[str, Any]:
    step = TrainerStep.prepare(settings.quick, **options)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    try:
        with sync_is_an_error():
            for _ in range(STEPS):
                step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return {"verdict": "WAITS", "where": _where(error)}
    return {"verdict": "ok", "steps": STEPS}


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    """Operations that wait for the card raise RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _where(error: BaseException) -> str:
    """The last line of the project in the traceback."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/vae/" in frame.filename.replace("\\", "/"):
            return f"{frame.filename.rpartition('vae')[2][1:]}:{frame.lineno} {frame.name}"
    return str(error)[:200]


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [[name, found["verdict"], found.get("where", "")] for name, found in results.items()]
    return markdown(["step", "verdict", "where it waits"], rows)
