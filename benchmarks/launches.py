#!/usr/bin/env python3
"""Kernel launches, synchronizations and host time of a step beside diffusers' step, on the null GPU.

    python -m tests.null_gpu --gib 512 python benchmarks/launches.py

The steps of the three ways alternate in one process. Host time is CPU time, the least of all steps; only its
ratio means something on another machine.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.system.gpu_memory import set_gpu_memory_variables  # noqa: E402
from vae.system.script import end_process  # noqa: E402

set_gpu_memory_variables()  # before PyTorch is imported, as every script does

import torch  # noqa: E402

from benchmarks.comparison import ours  # noqa: E402
from benchmarks.comparison.theirs import BF16_CHANNELS_LAST, Theirs  # noqa: E402
from benchmarks.comparison.work import Work  # noqa: E402
from tests.null_gpu.counters import Counters  # noqa: E402
from vae.config.options import SpeedConfig  # noqa: E402
from vae.ops.kernel_check import choose_kernels  # noqa: E402
from vae.training.memory.cuda_graph import WARMUP_STEPS, StepGraph  # noqa: E402
from vae.training.precision import set_backends  # noqa: E402
from vae.update import apply_update  # noqa: E402

OURS, GRAPH, THEIRS = "ours, without a graph", "ours, `--cuda_graph`", "diffusers"


@dataclass
class Cost:
    """What one step costs the host."""

    launches: float = 0.0  # of kernels, and calls of convolutions and matrix products
    graphs: float = 0.0
    synchronizations: float = 0.0
    host_ms: float = float("inf")


def costs_of(image_size: int, steps: int) -> dict[str, Cost]:
    """The cost of a step of one image, by the way in which it is made."""
    device, work = torch.device("cuda", 0), Work(image_size)
    mine, graph = ours.Ours(work, device), StepGraph()
    theirs = Theirs(work, device, BF16_CHANNELS_LAST, mine)

    def step_with_graph() -> None:
        graph.gradients(mine.networks, mine.inputs, mine.sizes)
        apply_update(mine.optimizers, mine.update, mine.optim, fp16=False, empty=False)

    ways: dict[str, Callable[[], None]] = {OURS: mine.step, GRAPH: step_with_graph, THEIRS: theirs.step}
    found = {name: Cost() for name in ways}
    for number in range(WARMUP_STEPS + 1 + steps):
        for name, step in ways.items():
            before, started = Counters.now(), time.process_time()
            step()
            counts, cost = Counters.now().since(before), found[name]
            if number <= WARMUP_STEPS:  # compilation, and the capture of the graph
                continue
            cost.host_ms = min(cost.host_ms, 1000 * (time.process_time() - started))
            cost.launches += (counts.launches + counts.library_calls) / steps
            cost.graphs += counts.graph_launches / steps
            cost.synchronizations += counts.synchronizations / steps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--px", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per size instead of a table"
    )
    given = parser.parse_args()
    set_backends(SpeedConfig())
    choose_kernels("auto", torch.device("cuda", 0), [torch.bfloat16])  # as every command: warns if one fails
    ours.initialize = lambda *_arguments: None  # type: ignore[assignment]  # nothing reads the weights
    if not given.json:
        print("| px | | launches | CUDA graphs | synchronizations | host, ms | ratio |")
        print("|---|---|---|---|---|---|---|")
    for size in given.px:
        costs = costs_of(size, given.steps)
        if given.json:
            print(json.dumps({name: asdict(cost) for name, cost in costs.items()}))
            continue
        for name, cost in costs.items():
            ratio = cost.host_ms / costs[THEIRS].host_ms
            numbers = f"{cost.launches:,.0f} | {cost.graphs:.0f} | {cost.synchronizations:.0f}"
            print(f"| {size} | {name} | {numbers} | {cost.host_ms:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
    end_process(0)
