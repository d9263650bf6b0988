#!/usr/bin/env python3
"""Compare predicted and measured peak memory of the trainer's step, per image size and recompute level.

Each case runs two passes of one image, so that gradients exist during the second pass, in its own process.
On a GPU it measures the default model in bf16, eager and compiled, at each recompute level that fits. On a
CPU it measures the live bytes while an eager step of a small model runs.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from tests.harness.memory_of_a_gpu import memory_of_a_gpu  # noqa: E402
from vae.config.options import RECOMPUTE, Config, build  # noqa: E402
from vae.losses.terms import build_terms  # noqa: E402
from vae.memory.available import available_bytes  # noqa: E402
from vae.memory.live_bytes import LiveBytes  # noqa: E402
from vae.memory.plan import StepMemory, reserve_bytes, stage_spec, step_memory  # noqa: E402
from vae.model.autoencoder import downsampling, set_recompute  # noqa: E402
from vae.step import Networks, StepInputs, compute_gradients  # noqa: E402
from vae.system.gpus import set_gpu_memory_variables  # noqa: E402
from vae.system.host import GIB  # noqa: E402
from vae.system.script import end_process  # noqa: E402
from vae.training.precision import compile_in_place, set_backends  # noqa: E402
from vae.training.state import begin_state  # noqa: E402
from vae.update import apply_update  # noqa: E402

SIZES = {"cuda": (512, 1024, 2048), "cpu": (64, 128)}
SMALL = {"channels": [32, 64, 64, 64], "layers_per_block": 1, "norm_groups": 8}
PASSES = 2
STEPS = 3  # the first creates the moments of AdamW
TIMEOUT_SECONDS = 1800  # per case: compilation takes minutes


@dataclass(frozen=True)
class Case:
    """A step to predict and to measure."""

    device: str
    image_size: int
    recompute: str
    compiled: bool

    def config(self) -> Config:
        """The configuration of the run; LPIPS with random weights needs as much memory as LPIPS."""
        small = SMALL if self.device == "cpu" else {}
        values = {"image_size": self.image_size, "batch_size": PASSES, "use_bf16": self.device == "cuda"}
        values["background_save"] = False  # this step saves nothing
        return build({**small, **values, "perceptual_net": "random", "use_torch_compile": self.compiled})

    def predicted(self) -> StepMemory:
        """The prediction of the memory plan."""
        config = self.config()
        reserve = reserve_bytes(config, is_gpu=self.device == "cuda")
        spec = stage_spec(config, self.image_size, PASSES, torch.bfloat16, reserve)
        return step_memory(replace(spec, recompute=self.recompute), 1)


def run_steps(case: Case, begin: Callable[[], None]) -> None:
    """Run the trainer's step STEPS times on random pixels; `begin` is called after everything is built."""
    device, config = torch.device(case.device), case.config()
    set_backends(config.speed)
    state = begin_state(config, device, fp16=False)
    set_recompute(state.autoencoder, case.recompute)
    terms = build_terms(config.loss, torch.bfloat16, device)
    if case.compiled:
        compile_in_place(state.autoencoder)
    networks = Networks(state.autoencoder, None, terms, torch.bfloat16, config.speed.channels_last)
    latent = case.image_size // downsampling(config.model)
    begin()
    for _ in range(STEPS):
        shape = (PASSES, 3, case.image_size, case.image_size)
        inputs = StepInputs(
            images=torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
            noise=torch.randn(PASSES, config.model.z_channels, latent, latent, device=device),
            image_share=1 / PASSES,
            loss_scale=state.update.loss_scale,
            adversarial_factor=None,
        )
        compute_gradients(networks, inputs, [1] * PASSES)
        apply_update(state.optimizers, state.update, config.optim, fp16=False, empty=False)
        state.update_ema(config.optim.ema_decay)


def begin_on_gpu() -> None:
    """Reset the peak, so that it does not include building."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure(case: Case) -> dict[str, float]:
    """Run the step of the case in this process; return GiB."""
    if case.device == "cpu":
        with memory_of_a_gpu(), LiveBytes() as counter:
            run_steps(case, lambda: setattr(counter, "peak", counter.current))
        return {"measured_gib": counter.peak / GIB}
    run_steps(case, begin_on_gpu)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "measured_gib": torch.cuda.max_memory_reserved() / GIB,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        # the CUDA context and allocations of libraries, if no other process uses the GPU
        "outside_pytorch_gib": (total - free - torch.cuda.memory_reserved()) / GIB,
    }


def measure_in_a_process(case: Case) -> dict[str, float]:
    """`measure` in a new process; RuntimeError if it fails."""
    words = [sys.executable, "-m", "benchmarks.memory_plan", json.dumps(asdict(case))]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished after {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(case: Case, available: int) -> dict:
    """The case with its prediction and, if it fits, its measurement."""
    memory = case.predicted()
    row = asdict(case) | {
        "predicted_gib": memory.predicted(available) / GIB,
        "tflop_per_image": memory.flops / 1e12,
    }
    if memory.total > available:
        return row | {"failure": f"does not fit in {available / GIB:.1f} GiB"}
    try:
        row |= measure_in_a_process(case)
    except RuntimeError as error:
        return row | {"failure": str(error)}
    return row | {"difference": row["measured_gib"] / row["predicted_gib"] - 1}


def table_line(row: dict) -> str:
    """One row of the table."""
    mode = "compiled" if row["compiled"] else "eager"
    head = f"| {row['image_size']} | {mode} | {row['recompute']} | {row['predicted_gib']:.3f} |"
    if "failure" in row:
        return f"{head} {row['failure']} | | |"
    outside = f"{row['outside_pytorch_gib']:.3f}" if "outside_pytorch_gib" in row else "-"
    return f"{head} {row['measured_gib']:.3f} | {row['difference']:+.1%} | {outside} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="image sizes in px; default 512 1024 2048, on a CPU 64 128"
    )
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=RECOMPUTE,
        default=list(RECOMPUTE),
        metavar="LEVEL",
        help="default: all",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("one", nargs="?", help=argparse.SUPPRESS)  # a case as JSON: measure it here
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(Case(**json.loads(given.one)))))
        return
    set_gpu_memory_variables()  # for the processes of the cases
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}, {PASSES} passes of one image, bf16")
    print("| px | mode | recompute | predicted GiB | measured GiB | difference | outside PyTorch GiB |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for size in given.sizes or SIZES[kind]:
        for compiled in (False, True) if kind == "cuda" else (False,):
            for level in given.recompute:
                rows.append(compare(Case(kind, size, level, compiled), available_bytes(device)))
                print(table_line(rows[-1]), flush=True)
    if given.json:
        about = {"device": name, "torch": str(torch.__version__), "rows": rows}
        given.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
    end_process(0)
