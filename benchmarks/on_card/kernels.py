"""Each Triton kernel beside PyTorch in fp64, at odd sizes and at those of real steps, in each dtype.

A process for each operation and dtype, several at once, because most of the time is compilation. Memory that
a kernel has to write holds NaN before. Tests at real sizes run twice: an error that changes is a race.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from benchmarks.comparison.ours import WAN_OPTIONS
from benchmarks.on_card.result import LATE, Result, first_line, flags
from tests.harness import kernel_checks as checks
from vae.config.resolve import resolve
from vae.device import DTYPES
from vae.memory.plan import reserve_bytes, stage_spec
from vae.ops import kernel_check
from vae.system.host import usable_cores
from vae.system.script import end_process
from vae.training.precision import kernel_shapes

OPERATIONS = ("norm", "rms_norm", "attention", "feature_distance")  # the slowest to compile first
NAMES = [f"{operation}:{dtype}" for operation in OPERATIONS for dtype in ("bf16", "fp16", "fp32")]
MAX_JOBS = 12  # a process needs about 1 GiB of the card
Row = dict[str, Any]


def odd_sizes(operation: str, dtype: torch.dtype, thorough: bool) -> list[tuple]:
    """Checks of the project's tests, each with its arguments after the device."""
    grids = {
        "norm": [(checks.check_norm, *case) for case in checks.norm_grid(thorough)],
        "rms_norm": [(checks.check_norm, *case) for case in checks.rms_grid()],
        "attention": [(checks.check_attention, *case) for case in checks.attention_grid()],
        "feature_distance": [(checks.check_feature_distance, *case) for case in checks.feature_grid()],
    }
    return [check for check in grids[operation] if dtype in check]


def step_sizes(operation: str, dtype: torch.dtype, small: bool) -> list[kernel_check.Shape]:
    """The shapes of an operation in the steps of profiles, and at 1000 px, which is no multiple of 16."""
    shapes = dict.fromkeys(kernel_check.SHAPES)
    for size in (64,) if small else (512, 1024, 1000):
        options = {"image_size": size, "batch_size": 1, "perceptual_net": "random"}
        config = resolve(options | (WAN_OPTIONS if operation == "rms_norm" else {}), None, None, {})
        spec = stage_spec(config, size, 1, dtype, reserve_bytes(config, is_gpu=True))
        shapes |= dict.fromkeys(kernel_shapes([spec]))
    return [shape for shape in shapes if shape.operation == operation]


def test(name: str, device: str, small: bool) -> Iterator[Row]:
    """Test one operation in one dtype; yields a row for each kernel and size."""
    operation, dtype = name.split(":")[0], DTYPES[name.split(":")[1]]
    if device == "cuda":  # empty memory holds NaN in this mode only
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    for check, *arguments in odd_sizes(operation, dtype, device == "cuda" and not small):
        row: Row = {"of": name, "case": f"{check.__name__} {arguments}", "problem": None, "error": 0.0}
        try:
            check(device, *arguments)
        except Exception as error:  # the driver, the compiler and PyTorch each raise their own types
            row["problem"] = first_line(error)
        yield row
    if device == "cpu":
        return  # Triton's interpreter needs hours for real sizes
    if name == "norm:bf16" and not small:
        kernel_check.MAX_ELEMENTS = 2**27  # 128 channels at 1024 px
    for shape in step_sizes(operation, dtype, small):
        runs = [kernel_check.run_tests(torch.device(device), [dtype], [shape]) for _ in range(2)]
        for outcome, again in zip(*runs, strict=False):
            problem = str(outcome) if outcome.is_broken else None
            if not problem and outcome.difference != again.difference:
                problem = f"the error of a second run is {again.difference:.1e}"
            case = f"{outcome.kernel} {tuple(shape)}"
            yield {"of": name, "case": case, "problem": problem, "error": outcome.difference}


def run_worker(options: argparse.Namespace, result: Result, name: str) -> tuple[list[Row], str]:
    """The rows of a process for one operation and dtype, and how it ended if not well."""
    if (left := result.seconds_left()) < 5:
        return [], f"{name} was not reached"
    words = [sys.executable, "-m", "benchmarks.on_card.kernels", "--worker", name, "--out", str(options.out)]
    words += ["--device", options.device, *["--small"] * options.small]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=left)
        printed, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        printed, code = error.stdout or b"", None
    lines = [line for line in printed.decode("utf-8", "replace").splitlines() if line.strip()]
    rows = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
    print(f"## {name}", *lines[-20:], sep="\n", flush=True)
    how = f"{name} FAILED, exit code {code}: {lines[-1][:200] if lines else ''}" if code else ""
    return rows, f"{name} was ended at the limit" if code is None else how


def summarize(rows: list[Row], notes: list[str]) -> tuple[str, str]:
    """The line and the verdict: counts, largest errors, then what is wrong."""
    wrong = [row for row in rows if row["problem"]]
    cells = []
    for name in sorted({row["of"] for row in rows}):
        own = [row for row in rows if row["of"] == name]
        right = sum(not row["problem"] for row in own)
        cells.append(f"{name} {right}/{len(own)} {max(row['error'] for row in own):.0e}")
    line = f"{len(rows) - len(wrong)} of {len(rows)} right (largest errors at real sizes): {', '.join(cells)}"
    line += "".join(f"\n   WRONG {r['of']} {r['case'][:80]}: {r['problem'][:200]}" for r in wrong[:10])
    line += "".join(f"\n   {note}" for note in notes)
    if not rows or wrong or any("FAILED" in note for note in notes):
        return line, "WRONG"
    return line, LATE if notes else "ok"


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="OPERATION:DTYPE")
    parser.add_argument("--jobs", type=int, default=max(1, min(MAX_JOBS, usable_cores() - 2)))
    parser.add_argument("--worker", choices=NAMES, help="test it in this process")
    options = parser.parse_args()
    if options.worker:
        for row in test(options.worker, options.device, options.small):
            print("ROW " + json.dumps(row), flush=True)
        return
    result = Result(options)
    notes: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed(pool.submit(run_worker, options, result, name) for name in options.only):
            rows, note = future.result()
            result.rows += rows
            notes += [note] if note else []
            result.write(*summarize(result.rows, notes))


if __name__ == "__main__":
    main()
    end_process(0)
