"""Part 1: memory outside of PyTorch's allocator, after each thing that loads a library or a kernel."""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.first_hour.case import DEVICE, Case, Settings, in_a_process, markdown
from vae.checks import nvidia_smi
from vae.system.script import end_process

TITLE = "Memory of the context, of libraries and of kernels, outside of PyTorch's allocator"
MIB = 2**20
MODULE = "benchmarks.first_hour.context"


def cases(settings: Settings) -> list[Case]:
    """Each is a new process; `lazy` is CUDA's default since version 11.7."""
    kinds = {"lazy loading": ("LAZY", False), "eager loading": ("EAGER", False), "compiled": ("LAZY", True)}
    kinds = dict(list(kinds.items())[: 1 if settings.quick else 3])
    return [
        Case(name, 60 + 120 * kind[1], lambda s, kind=kind: _measure(s, *kind))
        for name, kind in kinds.items()
    ]


def _measure(settings: Settings, loading: str, compiled: bool) -> dict[str, Any]:
    argument = {"quick": settings.quick, "compiled": compiled, "used_before": _used_bytes()}
    return in_a_process(MODULE, argument, settings.seconds_left, {"CUDA_MODULE_LOADING": loading})


def _used_bytes() -> int:
    """Bytes in use on the first card, which other programs and this process hold, or 0 if unknown."""
    smi = nvidia_smi.query(timeout_seconds=15)
    return (smi.cards[0].memory_used_mib or 0) * MIB if smi.cards else 0


def measure(argument: dict[str, Any]) -> dict[str, Any]:
    """MiB outside of the allocator after each stage, cumulative, without what was in use before."""
    from benchmarks.first_hour.trainer_step import TrainerStep

    found: dict[str, int] = {}

    def stage(name: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(DEVICE)
        outside = total - free - torch.cuda.memory_reserved(DEVICE) - argument["used_before"]
        found[name] = round(outside / MIB)

    torch.zeros(1, device=DEVICE)
    stage("context")
    matrix = torch.zeros(256, 256, device=DEVICE, dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    stage("cuBLAS")
    F.conv2d(torch.zeros(1, 8, 32, 32, device=DEVICE), torch.zeros(8, 8, 3, 3, device=DEVICE))
    stage("cuDNN")
    size = 64 if argument["quick"] else 512
    step = TrainerStep.prepare(argument["quick"], image_size=size, use_torch_compile=argument["compiled"])
    stage("networks and the test of the Triton kernels")
    for index in range(3):
        step()
        stage(f"step {index + 1}")
    planned = step.plan.memory.reserve / MIB
    growth = found["step 3"] - found["networks and the test of the Triton kernels"]
    return {"mib": found, "growth_after_planning_mib": growth, "reserve_of_the_plan_mib": round(planned)}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    if not results:
        return []
    stages = list(next(iter(results.values()))["mib"])
    rows = [[name, *(found["mib"][stage] for stage in stages)] for name, found in results.items()]
    lines = ["MiB after each stage, cumulative:", "", *markdown(["process", *stages], rows), ""]
    for name, found in results.items():
        lines.append(
            f"After the plan is made, {name} grows by {found['growth_after_planning_mib']} MiB; the plan "
            f"reserves {found['reserve_of_the_plan_mib']} MiB, workspaces included."
        )
    return lines


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
    end_process(0)
