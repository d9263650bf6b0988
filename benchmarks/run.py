#!/usr/bin/env python3
"""Compare this project with diffusers' AutoencoderKL and its trainer's step: ten cases in one process.

On a CPU the sizes are small and it takes some minutes; on a GPU they are large and should take eight minutes
on an H200. Both sides have the same weights, images and noise. Before it measures anything, it checks that
both sides give the same reconstruction, losses and gradients. It needs requirements-test.txt.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.system.files import write_json  # noqa: E402
from vae.system.gpus import set_gpu_memory_variables  # noqa: E402
from vae.system.script import end_process  # noqa: E402

if __name__ == "__main__":
    set_gpu_memory_variables()  # before PyTorch is imported, as every script does

import torch  # noqa: E402

from benchmarks.comparison import report  # noqa: E402
from benchmarks.comparison.cases import CASES, Bench  # noqa: E402
from benchmarks.comparison.measuring import Measured, Stopwatch  # noqa: E402
from benchmarks.comparison.theirs import check_same_work  # noqa: E402


def case_numbers(text: str) -> list[int]:
    """The numbers in "1,2"."""
    numbers = sorted({int(word) for word in text.split(",")})
    if not set(numbers) <= CASES.keys():
        raise ValueError
    return numbers


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", type=case_numbers, metavar="1,2", help="run only these; default: all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="sizes for a CPU; the default on a CPU")
    size.add_argument("--large", action="store_true", help="sizes for a GPU; the default on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rounds", type=int, help="minimum repeats of each run; default: 2, on a GPU 3")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU; default: 1")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="in cases 2, 7, 8, 11, also measure with torch.compile; default: on a GPU",
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after this time no compiled variant starts; default: 8"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to this file as JSON")
    options = parser.parse_args()
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"{options.out}: the folder {options.out.parent} does not exist: create it first")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.large and options.device == "cpu":
        parser.error("--large is for GPUs, because one of its steps takes hours on a CPU: remove the flag")
    return options


def main() -> None:
    """Check, measure, print, and write the requested files."""
    options = read_options()
    start = time.monotonic()
    gpu = options.device == "cuda"
    if not gpu:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True  # as in the trainer; sizes are fixed
    torch.set_float32_matmul_precision("high")
    compiled = gpu if options.compile is None else options.compile
    size = "large" if options.large or (gpu and not options.small) else "small"
    device = torch.device(options.device)
    stopwatch = Stopwatch(device, options.rounds or (3 if gpu else 2), start + options.minutes * 60)
    found = {"machine": report.describe_machine(device), "size": size, "clock": stopwatch.clock}
    print(json.dumps(found["machine"], indent=1))
    run_cases(Bench(stopwatch, size, compiled), options, found, start)
    print(f"\n{found['minutes']} minutes")


def run_cases(bench: Bench, options: argparse.Namespace, found: dict[str, Any], start: float) -> None:
    """Check that both sides do the same work, then measure the cases; add the results to `found`."""
    found["same_work"] = check_same_work(bench.device)
    print("same work on both sides:", json.dumps(found["same_work"]))
    found["cases"] = {}
    for number in options.cases or CASES:
        title = CASES[number].__doc__
        contestants: dict[str, dict] = {}
        found["cases"][str(number)] = {"title": title, "contestants": contestants}

        def keep(results: Iterable[Measured], contestants: dict[str, dict] = contestants) -> None:
            contestants |= {measured.name: measured.as_dict() for measured in results}
            write(options.out, found, start)  # a run that is stopped early keeps what it has measured

        bench.stopwatch.report = keep
        result = report.run_case(bench, number)
        found["cases"][str(number)] = {"title": title, **result}
        print("", *report.tables({f"{number}. {title}": result}), sep="\n")
        write(options.out, found, start)


def write(path: Path | None, found: dict[str, Any], start: float) -> None:
    """Write all results so far, if a file was requested."""
    found["minutes"] = round((time.monotonic() - start) / 60, 2)
    if path is not None:
        write_json(path, found, indent=1)


if __name__ == "__main__":
    main()
    end_process(0)
