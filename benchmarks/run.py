#!/usr/bin/env python3
"""Ours against diffusers' AutoencoderKL and its trainer's step: ten cases, one process, one table.

Small sizes on a CPU (some minutes), large ones on a GPU (meant for eight minutes on an H200). Both sides have
the same weights, images and noise; first they are checked to give the same reconstruction, losses and
gradients.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CASE_COUNT = 10


def case_numbers(text: str) -> list[int]:
    """ "1,2" as numbers."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(not 1 <= number <= CASE_COUNT for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 1 to {CASE_COUNT} with commas, as 1,2")
    return sorted(set(numbers))


def at_least_one(text: str) -> int:
    """A count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1")
    return int(text)


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", type=case_numbers, metavar="1,2", help="only these; default: all ten")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="sizes for a CPU; the default there")
    size.add_argument("--large", action="store_true", help="sizes for a card; the default there")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rounds", type=at_least_one, help="repeats of each run, at least; 2, on a card 3")
    parser.add_argument("--threads", type=at_least_one, default=1, help="threads on a CPU; 1")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="also with torch.compile, both sides, in case 2; default: on a card",
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after these no compiled variant and no curve is begun; 8"
    )
    parser.add_argument(
        "--profile", action="store_true", help="only the five largest items of each side's step"
    )
    parser.add_argument("--curve", action="store_true", help="also time and count over resolution")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw the curve there as SVG; implies --curve"
    )
    options = parser.parse_args(words)
    for path in (options.out, options.chart):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}: make it first")
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder: name a file in it")
    for package in ("torch", "diffusers", "lpips"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install -r requirements-test.txt")
    return options


def main() -> None:
    """Check, measure, print; write what was asked for."""
    options = read_options()
    import torch

    from benchmarks.comparison import report
    from benchmarks.comparison.cases import CASES, Bench
    from benchmarks.comparison.curve import curve, draw
    from benchmarks.comparison.equality import check_same_work
    from benchmarks.comparison.goals import judge
    from benchmarks.comparison.measuring import Stopwatch
    from benchmarks.comparison.profiling import largest_items

    device = choose_device(options, torch)
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True  # as the trainer does; sizes are fixed
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    gpu = device.type == "cuda"
    compiled = gpu if options.compile is None else options.compile
    size = "large" if options.large or (gpu and not options.small) else "small"
    bench = Bench(
        Stopwatch(device, options.rounds or (3 if gpu else 2), began + options.minutes * 60), size, compiled
    )
    found = {"machine": report.describe_machine(device, ROOT), "size": size, "clock": bench.stopwatch.clock}
    print(json.dumps(found["machine"], indent=1))
    if options.profile:
        found["profile"] = largest_items(bench)
        print(json.dumps(found["profile"], indent=1))
    else:
        found["same_work"] = check_same_work(device)
        print("same work on both sides:", json.dumps(found["same_work"]))
        found["cases"] = {}
        for number in options.cases or CASES:
            title, result = CASES[number].__doc__, CASES[number](bench)
            result["goals"] = judge(number, result, gpu)
            if number == 2 and gpu:
                result |= report.share_of_card(result, *report.card(device))
            found["cases"][str(number)] = {"title": title, **result}
            report.print_case(number, title, result)
            write(options.out, found, began)  # a run that is ended early has left its cases
        if options.curve or options.chart:
            found["curve"] = curve(bench)
    write(options.out, found, began)
    print(f"\n{found['minutes']} minutes")
    if options.chart:
        options.chart.write_text(draw(found["curve"], found["machine"]), encoding="utf-8")


def write(path: Path | None, found: dict, began: float) -> None:
    """All that is known so far, where a file was asked for."""
    found["minutes"] = round((time.monotonic() - began) / 60, 2)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def choose_device(options: argparse.Namespace, torch):
    """The device asked for; ends with one line where there is none."""
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        sys.exit("--device cuda: PyTorch finds no CUDA device here: leave it out to measure on the CPU")
    device = torch.device("cuda" if has_cuda and options.device != "cpu" else "cpu")
    if options.large and device.type == "cpu":
        sys.exit("--large is for cards: one of its steps takes hours on a CPU; leave it out")
    return device


if __name__ == "__main__":
    main()
