#!/usr/bin/env python3
"""Kernel launches, collectives, host time and memory of a step of two processes, on the null GPU.

    python -m tests.null_gpu --sm 90 python benchmarks/two_cards.py --data_path ./data/demo

Each process has a card, as on two machines; collectives return at once. Host time is CPU time of the process,
the least of all measured steps; only its ratio means something on another machine. Memory is what PyTorch has
reserved since the first step, and the plan of the stage.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vae.system.gpus import set_gpu_memory_variables  # noqa: E402
from vae.system.script import end_process  # noqa: E402

WARM_UP = 10  # steps: compilation, and DistributedDataParallel times the first ones, which synchronizes
BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel


def train_and_measure(given: dict[str, Any], steps: int) -> None:
    """Train as one of two processes; the first one prints the least cost of the steps as JSON."""
    set_gpu_memory_variables()  # before PyTorch is imported, as every script does
    import torch
    from torch.nn.parallel import distributed

    from tests.null_gpu.counters import Counters
    from vae.system.host import GIB
    from vae.training.loop import TrainingLoop
    from vae.training.run import train
    from vae.training.setup import PreparedRun
    from vae.training.stage_memory import StagePlan

    costs: list[dict[str, float]] = []
    plans: list[StagePlan] = []
    take_step = TrainingLoop.take_step
    plan_stage = PreparedRun.plan

    def kept_plan(self: PreparedRun, stage: Any) -> StagePlan:
        plans.append(plan_stage(self, stage))
        return plans[-1]

    def measured_step(self: TrainingLoop, batch: Any) -> Any:
        before, started, clock = Counters.now(), time.process_time(), time.perf_counter()
        end = take_step(self, batch)
        cost: dict[str, float] = vars(Counters.now().since(before)).copy()
        cost["host_ms"] = 1000 * (time.process_time() - started)
        cost["wall_ms"] = 1000 * (time.perf_counter() - clock)
        costs.append(cost)
        if len(costs) == WARM_UP + steps:
            if self.stepper.dist.is_main:
                found = {name: min(c[name] for c in costs[WARM_UP:]) for name in costs[0]}
                found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
                found["predicted_gib"] = plans[-1].predicted / GIB
                print(json.dumps(found))
            sys.stdout.flush()
            os._exit(0)  # no result can be saved
        return end

    # Whatever the host reads back from a card is zero, but these compare and exchange the networks' shapes.
    distributed._verify_param_shape_across_processes = lambda *_: True  # type: ignore[assignment]
    torch.distributed.Reducer._rebuild_buckets = lambda _: False  # type: ignore[method-assign]
    assign, sizes = distributed.dist._compute_bucket_assignment_by_size, [2**20, BUCKET_BYTES]
    distributed.dist._compute_bucket_assignment_by_size = lambda ps, _, *rest: assign(ps, sizes, *rest)
    TrainingLoop.take_step = measured_step  # type: ignore[method-assign]
    PreparedRun.plan = kept_plan  # type: ignore[method-assign]
    train(given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_path", required=True)
    parser.add_argument("--px", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--options", default="{}", help="JSON of options of train_vae.py")
    words = parser.parse_args()
    given = {"data_path": words.data_path, "image_size": words.px, "batch_size": 2, "use_bf16": True}
    given |= {"perceptual_net": "random", "val_split": 0.0, "num_epochs": 1000, "device": "cuda"}
    given |= {"log_freq": 10**9, "num_workers": "0", "init": "default", **json.loads(words.options)}
    if "RANK" in os.environ:
        train_and_measure(given, words.steps)
        end_process(0)
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        given["output_dir"] = str(Path(folder, "run"))
        processes = []
        for rank in range(2):
            environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            arguments = [*sys.argv, "--options", json.dumps(given)]
            processes.append(subprocess.Popen([sys.executable, *arguments], env={**os.environ, **environ}))
        sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
