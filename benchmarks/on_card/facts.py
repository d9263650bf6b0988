"""Card and versions, and what the card reaches in bf16: copies, matrix products, convolutions."""

import shutil
import subprocess
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.comparison.report import describe_machine
from benchmarks.on_card.result import Result, flags
from vae.system.script import end_process

SMI_FIELDS = "driver_version,memory.used,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
LEVELS = ((128, 1), (256, 2), (512, 4))  # channels of the default network, and its downsampling there


def milliseconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """The median time of `run` on the card, after three runs that are not measured."""
    times = []
    for _ in range(3 + repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return median(times[3:])


def rates(small: bool) -> dict[str, float]:
    """TB/s of a copy; TFLOP/s of a matrix product and of the 3x3 convolutions of a step at 1024 px."""
    found = {}
    source, target = (torch.empty(2**24 if small else 2**31, dtype=torch.uint8, device="cuda") for _ in "ab")
    found["copy"] = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e9
    side = 512 if small else 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    found["matrix product"] = 2 * side**3 / milliseconds(lambda: a @ b) / 1e9
    for channels, factor in LEVELS:
        px = (64 if small else 1024) // factor
        shapes = ((1, channels, px, px), (channels, channels, 3, 3), (1, channels, px, px))
        h, weight, gradient = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            for shape in shapes
        )
        leaves = [h.requires_grad_(), weight.requires_grad_()]

        def step(leaves: list[torch.Tensor] = leaves, gradient: torch.Tensor = gradient) -> None:
            torch.autograd.grad(torch.nn.functional.conv2d(*leaves, padding=1), leaves, gradient)

        work = 3 * 2 * 9 * channels**2 * px**2  # forward and two gradients
        found[f"convolution of {channels} channels"] = work / milliseconds(step) / 1e9
    return {name: float(f"{rate:.3g}") for name, rate in found.items()}


def main() -> None:
    options = flags(__doc__).parse_args()
    result = Result(options)
    facts = describe_machine(torch.device("cuda"))
    if program := shutil.which("nvidia-smi"):
        words = [program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=15)
        facts[SMI_FIELDS] = done.stdout.strip()
    result.add(facts)
    line = ", ".join(f"{name} {value}" for name, value in facts.items())
    result.write(line, "-")
    torch.backends.cudnn.benchmark = True  # as in the trainer
    result.add(rates(options.small))
    result.write(f"{line}; TB/s and TFLOP/s in bf16: {result.rows[-1]}", "-")


if __name__ == "__main__":
    main()
    end_process(0)
