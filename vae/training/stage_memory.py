"""The memory of a stage: planned before it begins, measured while it runs, both in the run's records."""

import sys
from dataclasses import dataclass

import torch

from vae.host import GIB
from vae.memory.available import available_bytes, reserve_bytes
from vae.memory.plan import StepMemory, choose_step
from vae.memory.plan_table import way_of
from vae.memory.stage_spec import stage_spec
from vae.training.logbook import Logbook, say
from vae.training.setup import Run
from vae.training.stages import Stage


@dataclass(frozen=True)
class StagePlan:
    """The memory predicted for the stage's step as it was chosen, and the bytes it was chosen for."""

    memory: StepMemory
    available: int


def plan_stage(run: Run, stage: Stage) -> StagePlan:
    """How the step of `stage` is to run; UserError where not even one image fits."""
    speed = run.config.speed
    device = run.processes.device
    spec = stage_spec(
        run.config,
        stage.image_size,
        stage.batch_size,
        run.networks.dtype,
        reserve_bytes(device),
        run.processes.world,
    )
    available = int(available_bytes(device) * speed.vram_margin)
    return StagePlan(choose_step(spec, available, speed.micro_batch_size, speed.recompute), available)


def plan_line(run: Run, stage: Stage, plan: StagePlan) -> str:
    """What is planned: the stage's line of `check_compatibility.py --plan`; a second where it may not fit."""
    line = (
        f"{stage.image_size} px, batch {run.local_batch(stage)} as "
        f"{way_of(plan.memory, run.local_batch(stage))}: predicted peak {plan.memory.total / GIB:.2f} GiB "
        f"of {plan.available / GIB:.1f} GiB that may be used"
    )
    if plan.memory.total <= plan.available:
        return line
    asked = run.config.speed.micro_batch_size
    return (
        f"{line}\nWARNING: --micro_batch_size {asked} is taken as it is and may run out of memory: "
        "auto takes what fits"
    )


def begin_measuring(device: torch.device) -> None:
    """Forget what earlier stages took, so that a card's peaks are those of the stage that begins."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB: the stage's peaks on the card so far; without one, the process's largest size since it began."""
    if device.type == "cuda":
        return {
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB on Linux
    return {"memory_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


def record_measured(run: Run, stage: Stage, plan: StagePlan, logbook: Logbook) -> None:
    """Write the stage's measured peaks beside the predicted one, and say them."""
    if not run.processes.is_main:
        return
    measured = memory_in_use(run.processes.device)
    record = {
        "image_size": stage.image_size,
        "micro_batch": run.micro_batch,
        "recompute": run.recompute,
        "predicted_peak_gib": plan.memory.total / GIB,
        **measured,
    }
    logbook.record("memory", run.state.position.step, record)
    planned = (plan.memory.recompute, plan.memory.micro_batch)
    say(measured_line(record, replanned=(run.recompute, run.micro_batch) != planned))


def measured_line(record: dict[str, float], replanned: bool = False) -> str:
    """Predicted beside measured in one line; the size of a process is no measure of the step."""
    line = f"memory  predicted peak {record['predicted_peak_gib']:.2f} GiB"
    if replanned:
        line += " (before memory ran out and it was lowered)"
    if "memory_reserved_gib" in record:
        reserved = record["memory_reserved_gib"]
        difference = reserved / record["predicted_peak_gib"] - 1
        return f"{line}, measured {reserved:.2f} GiB reserved on the card ({difference:+.1%})"
    if "memory_peak_gib" in record:
        line += f"; the process took {record['memory_peak_gib']:.2f} GiB at most, libraries and data included"
    return f"{line} (the step alone is measured on cards only)"
