#!/usr/bin/env python3
"""Kernel launches, synchronizations, host time and memory beside diffusers and PyTorch, on the null GPU.

    python -m tests.null_gpu --gib 512 python benchmarks/launches.py
    python -m tests.null_gpu --gib 512 python benchmarks/launches.py --what decode norm --compile

The ways alternate in one process. Host time is CPU time, the least of all rounds; only its ratio means
something on another machine. GiB are the peak of the allocator above what is alive between two rounds.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.system.gpus import set_gpu_memory_variables  # noqa: E402
from vae.system.script import end_process  # noqa: E402

set_gpu_memory_variables()  # before PyTorch is imported, as every script does

import torch  # noqa: E402
from diffusers import AutoencoderKLWan  # noqa: E402

from benchmarks.comparison import operations, ours  # noqa: E402
from benchmarks.comparison.ours import WAN_OPTIONS, Work  # noqa: E402
from benchmarks.comparison.theirs import BF16_BEST_COMPILED, BF16_CHANNELS_LAST, Theirs  # noqa: E402
from tests.null_gpu.counters import Counters  # noqa: E402
from vae.config.model_options import ModelConfig  # noqa: E402
from vae.config.options import SpeedConfig  # noqa: E402
from vae.model.autoencoder import AutoencoderKL  # noqa: E402
from vae.ops.kernel_check import choose_kernels  # noqa: E402
from vae.system.host import GIB  # noqa: E402
from vae.training.cuda_graph import WARMUP_STEPS, StepGraph  # noqa: E402
from vae.training.precision import set_backends  # noqa: E402
from vae.update import apply_update  # noqa: E402

OURS, GRAPH = "ours, without a graph", "ours, `--cuda_graph`"
THEIRS, COMPILED = "diffusers", "diffusers, compiled"
# Not max-autotune: it times hundreds of kernels, and on this device all take the same time.
COMPILED_VARIANT = replace(BF16_BEST_COMPILED, mode="default")
DEVICE = torch.device("cuda", 0)
WAN = ModelConfig(**WAN_OPTIONS, z_channels=16)
Ways = dict[str, Callable[[], Any]]


@dataclass
class Cost:
    """What one round costs the host, and its memory."""

    launches: float = 0.0  # of kernels, and library calls
    library_calls: float = 0.0  # convolutions and matrix products
    graphs: float = 0.0
    synchronizations: float = 0.0
    host_ms: float = float("inf")
    peak_gib: float = 0.0
    reserved_gib: float = 0.0  # by the allocator, from an empty cache


def costs_of(ways: Ways, rounds: int) -> dict[str, Cost]:
    """The cost of each way, after compilation and the capture of a graph."""
    found = {name: Cost() for name in ways}
    for number in range(WARMUP_STEPS + 1 + rounds):
        for name, run in ways.items():
            if number == WARMUP_STEPS:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            alive = torch.cuda.memory_allocated()
            reserved = torch.cuda.memory_reserved()
            before, started = Counters.now(), time.process_time()
            run()
            counts, cost = Counters.now().since(before), found[name]
            if number == WARMUP_STEPS:
                cost.reserved_gib = (torch.cuda.max_memory_reserved() - reserved) / GIB
            if number <= WARMUP_STEPS:
                continue
            cost.host_ms = min(cost.host_ms, 1000 * (time.process_time() - started))
            cost.launches += (counts.launches + counts.library_calls) / rounds
            cost.library_calls += counts.library_calls / rounds
            cost.graphs += counts.graph_launches / rounds
            cost.synchronizations += counts.synchronizations / rounds
            cost.peak_gib = max(cost.peak_gib, (torch.cuda.max_memory_allocated() - alive) / GIB)
    return found


def step_ways(px: int, compiled: bool) -> Ways:
    """A training step of one image."""
    work = Work(px)
    mine, graph = ours.Ours(work, DEVICE), StepGraph()

    def step_with_graph() -> None:
        graph.gradients(mine.networks, mine.inputs, mine.sizes)
        apply_update(mine.optimizers, mine.update, mine.optim, fp16=False, empty=False)

    ways: Ways = {OURS: mine.step, GRAPH: step_with_graph}
    ways[THEIRS] = Theirs(work, DEVICE, BF16_CHANNELS_LAST, mine).step
    if compiled:
        ways[COMPILED] = Theirs(work, DEVICE, COMPILED_VARIANT, mine).step
    return ways


def decode_ways(px: int, compiled: bool) -> Ways:
    """Decoding the latents of one image."""
    work = Work(px, perceptual=False)
    builds = operations.decoders(work, DEVICE, [BF16_CHANNELS_LAST, *[COMPILED_VARIANT] * compiled])
    return {name: build() for name, build in zip(("ours", THEIRS, COMPILED), builds.values(), strict=False)}


def norm_ways(px: int, compiled: bool) -> Ways:
    """GroupNorm and SiLU of 128 channels, forward and backward."""
    return operations.norm_ways(px, DEVICE, compiled)


def wan_ways(px: int, _compiled: bool) -> Ways:
    """Forward and backward of Wan 2.1's decoder for one image: our 2-D network, and diffusers' 3-D class."""
    with torch.device("meta"):
        mine = AutoencoderKL(WAN)
        theirs = AutoencoderKLWan()
    mine.to_empty(device=DEVICE).to(memory_format=torch.channels_last).freeze_encoder()
    theirs.to_empty(device=DEVICE).to(torch.bfloat16)
    latents = torch.zeros(1, WAN.z_channels, px // 8, px // 8, dtype=torch.bfloat16, device=DEVICE)
    images = torch.zeros(1, 3, px, px, dtype=torch.bfloat16, device=DEVICE)

    def pass_of(
        decode: Callable[..., torch.Tensor], model: torch.nn.Module, frames: bool
    ) -> Callable[[], Any]:
        """With `frames`, latents and images have an axis of time."""
        given, gradient = (tensor[:, :, None] if frames else tensor for tensor in (latents, images))
        parts = (model.get_submodule(name) for name in ("decoder", "post_quant_conv"))
        weights = [weight for part in parts for weight in part.parameters()]
        return lambda: torch.autograd.grad(decode(given), weights, gradient, allow_unused=True)

    return {
        "ours": pass_of(mine.decode, mine, frames=False),
        THEIRS: pass_of(lambda latents: theirs.decode(latents).sample, theirs, frames=True),
    }


WHAT = {"step": step_ways, "decode": decode_ways, "norm": norm_ways, "wan": wan_ways}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--px", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="also compiled diffusers: minutes each")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per size instead of a table"
    )
    given = parser.parse_args()
    set_backends(SpeedConfig())
    with contextlib.redirect_stdout(sys.stderr):
        choose_kernels("auto", DEVICE, [torch.bfloat16])  # as every command: warns if one fails
    ours.initialize = lambda *_arguments: None  # type: ignore[assignment]  # nothing reads the weights
    if not given.json:
        columns = ("launches", "library calls", "CUDA graphs", "synchronizations", "host, ms")
        print(f"| | px | | {' | '.join(columns)} | peak GiB | reserved GiB |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for what in given.what:
        for px in given.px:
            costs = costs_of(WHAT[what](px, given.compile), given.steps)
            if given.json:
                print(json.dumps({name: asdict(cost) for name, cost in costs.items()}), flush=True)
                continue
            for name, cost in costs.items():
                numbers = f"{cost.launches:,.0f} | {cost.library_calls:,.0f} | {cost.graphs:.0f}"
                numbers += f" | {cost.synchronizations:.0f} | {cost.host_ms:.2f}"
                figures = f"{numbers} | {cost.peak_gib:.2f} | {cost.reserved_gib:.2f}"
                print(f"| {what} | {px} | {name} | {figures} |", flush=True)
            if what == "norm" and not operations.has_nhwc_group_norm(DEVICE):
                print(f"| {what} | {px} | {operations.OWN_NHWC_NORM} | not in PyTorch {torch.__version__} |")


if __name__ == "__main__":
    main()
    end_process(0)
