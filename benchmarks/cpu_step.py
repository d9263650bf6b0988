"""Time of one training step of the demo's network on this CPU, by precision, threads and load.

python benchmarks/cpu_step.py [--dtypes bfloat16] [--threads 1 2] [--emulated_bf16]

"loaded" is a machine on which one busy loop per core runs beside the step. An older CPU is imitated in two
ways: ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 in the environment gives its fp32 arithmetic, and
--emulated_bf16 computes bf16 without oneDNN, as a CPU without native bf16 does. OMP_WAIT_POLICY=ACTIVE lets
waiting threads spin. Prints seconds per step, minimum and median.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vae.script import limit_spinning  # does not import PyTorch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--emulated_bf16", action="store_true")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=6, help="of each cell of the table")
    args = parser.parse_args()
    limit_spinning()
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.backends.mkldnn.enabled = not args.emulated_bf16
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    print(f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}, OMP_WAIT_POLICY {policy}")
    for name in args.dtypes:
        step = demo_step(getattr(torch, name))
        for threads in args.threads:
            torch.set_num_threads(threads)
            for busy in (0, cores):
                with busy_loops(busy):
                    times = step_times(step, args.seconds)
                load = "loaded" if busy else "idle"
                print(
                    f"{name:8s} threads {threads} {load:6s} min {min(times):7.3f} s, "
                    f"median {statistics.median(times):7.3f} s of {len(times)}",
                    flush=True,
                )


def demo_step(dtype):
    """One whole step as the demo trains: batch 4 at 128 px, L1 and KL."""
    import torch

    from benchmarks.comparison.ours import Ours
    from benchmarks.comparison.work import Work
    from vae.config.options import ModelConfig

    shape = ModelConfig(channels=(32, 64, 64, 64), layers_per_block=1, norm_groups=8, init="default")
    work = Work(128, batch=4, perceptual=False, model=shape)
    return Ours(work, torch.device("cpu"), dtype).step


def step_times(step, seconds: float) -> list[float]:
    """Seconds of each step; the first one is not counted, and at least two are."""
    step()
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` processes that never sleep."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
