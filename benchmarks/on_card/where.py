"""Where the time of a step goes: kernels by kind, from traces of PyTorch's profiler; the first is kept."""

import gzip
import json
import re
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.comparison.ours import Ours, Work
from benchmarks.on_card.result import Result, flags
from vae.config.options import SpeedConfig
from vae.ops.kernel_check import choose_kernels
from vae.system.script import end_process
from vae.training.precision import set_backends

STEPS, WARMUP_STEPS = 2, 4
SIZES = ((1024, 2, "none"), (2048, 1, "activations"))  # px, batch, recompute level
SIZE_SECONDS = 15.0  # that must be left to start the second one
NO_KERNELS = "the trace has no kernels"
PREDICTED = "benchmarks/LOG.md predicts: convolutions 74 %, attention 11 %, other traffic 15 %"
KINDS = {  # names of kernels; the first match counts
    "our norms": r"moments_kernel|normalize_kernel|sums_kernel|input_gradient_kernel|add_kernel",
    "our softmax and LPIPS": r"softmax_kernel|row_products_kernel|^gradient_kernel|distance_kernel",
    "layout copies": r"nchwToNhwc|nhwcToNchw|transpose",
    "convolutions": r"conv|xmma|fprop|dgrad|wgrad|implicit|cudnn|cutlass.*tensorop.*nhwc",
    "matrix products": r"gemm|nvjet|cublas|cutlass|splitK",
    "optimizer": r"Adam|multi_tensor|foreach|lerp",
    "pooling": r"pool",
    "sums": r"reduce",
    "copies, casts, fills": r"copy|Memcpy|cat_|Memset|fill",
    "pointwise": r"elementwise|vectorized|pointwise",
}


def describe(events: list[dict[str, Any]], steps: int) -> str:
    """Kernels of a trace (times in microseconds) by kind, and the ten longest ones, in ms per step."""
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        return NO_KERNELS
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    busy = until = 0.0
    for event in sorted(found, key=lambda event: event["ts"]):
        name, milliseconds = event["name"], event["dur"] / 1e3
        kinds[next((kind for kind in KINDS if re.search(KINDS[kind], name, re.I)), "other")] += milliseconds
        names[name[:90]] += milliseconds
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    span = max(until - min(event["ts"] for event in found), 1e-9)
    line = f"{span / steps / 1e3:.1f} ms a step, {len(found) // steps} kernels, idle {1 - busy / span:.1%}; "
    total = max(sum(kinds.values()), 1e-9)
    line += ", ".join(f"{kind} {ms / steps:.2f} ms {ms / total:.0%}" for kind, ms in kinds.most_common())
    return line + "".join(f"\n   {ms / steps:7.2f} ms {name}" for name, ms in names.most_common(10))


def main() -> None:
    options = flags(__doc__).parse_args()
    device = torch.device("cuda")
    set_backends(SpeedConfig())
    choose_kernels("triton", device, [torch.bfloat16])
    result = Result(options)
    lines = [PREDICTED]
    for px, batch, level in SIZES:
        if result.rows and result.seconds_left() < SIZE_SECONDS:
            break
        px //= 16 if options.small else 1
        side = Ours(Work(px, batch), device, recompute=level)
        for _ in range(WARMUP_STEPS):
            side.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                side.step()
            torch.cuda.synchronize()
        path = options.out.with_name(f"trace{px if result.rows else ''}.json.gz")  # the first one is kept
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as packed:
            shown = describe(json.load(packed)["traceEvents"], STEPS)
        result.add({"px": px, "shown": shown})
        lines.append(f"{px} px x {batch}: {shown}")
        result.write("\n   ".join(lines), "WRONG" if NO_KERNELS in shown else "-")
        del side, profiler
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
    end_process(0)
