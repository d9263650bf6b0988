#!/usr/bin/env python3
"""The first hour on a card: measure everything that could not be measured without one.

Eight parts of at most eight minutes each on an H100. Each part is a process of its own; its file in --out is
written after each case. The same command continues after an interruption, and runs again what failed or was
not reached.

  python benchmarks/first_hour.py --out FOLDER                      all parts
  python benchmarks/first_hour.py --out FOLDER --parts 1 3          only these
  python benchmarks/first_hour.py --out FOLDER --quick              small sizes, to try the program

At the end it writes FOLDER/measurements.md and FOLDER/measured.json: the tables for docs/measurements.md, and
launch shapes and margins for this card. benchmarks/README.md describes the parts.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.first_hour.record import (  # noqa: E402
    EXIT_CARD_LOST,
    FAILED,
    NOT_REACHED,
    OtherMachineError,
    Record,
)
from benchmarks.first_hour.summary import NUMBERS  # noqa: E402
from vae.system.gpu_memory import set_gpu_memory_variables  # noqa: E402
from vae.system.script import end_process  # noqa: E402

GRACE_SECONDS = 60  # for the last case of a part; then its process is ended


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for all results")
    parser.add_argument(
        "--parts",
        type=int,
        nargs="+",
        choices=NUMBERS,
        default=list(NUMBERS),
        metavar="N",
        help="default: all",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few cases")
    parser.add_argument(
        "--data_path", metavar="DIR", help="photographs for part 8; default: drawn images (prepare_data.py)"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no case of a part starts after this time; default: 8"
    )
    parser.add_argument(
        "--write_docs", action="store_true", help="also write the tables to docs/measurements.md"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out.is_file():
        parser.error(f"--out {options.out} is a file: give a folder")
    if options.data_path and not Path(options.data_path).is_dir():
        parser.error(f"--data_path {options.data_path} is not a folder")
    for package in ("torch", "diffusers", "lpips", "pytest"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install -r requirements-test.txt")
    return options


def main() -> int:
    """Run the parts, then write the tables."""
    options = read_options()
    set_gpu_memory_variables()
    if options.child:
        return run_child(options)
    options.out.mkdir(parents=True, exist_ok=True)
    codes = [run_in_process(options, number) for number in sorted(set(options.parts))]
    from benchmarks.first_hour.summary import write_summary

    write_summary(options.out, write_docs=options.write_docs)
    return max(codes)


def run_child(options: argparse.Namespace) -> int:
    """The process of one part."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device: the first hour needs a card")
    from benchmarks.first_hour.case import Settings
    from benchmarks.first_hour.run_part import run_part

    deadline = time.monotonic() + options.minutes * 60
    settings = Settings(options.out.resolve(), options.quick, options.data_path, deadline)
    try:
        return run_part(options.child, settings)
    except OtherMachineError as error:
        sys.exit(str(error))


def run_in_process(options: argparse.Namespace, number: int) -> int:
    """Run a part in its own process, and in a new one if a case ends this process; returns an exit code."""
    if before := Record.read(options.out, number):
        before.forget_unfinished()
    print(f"part {number}", flush=True)
    ends = time.monotonic() + options.minutes * 60
    while True:
        code = watch(options, number, ends)
        record = Record.read(options.out, number)
        if record and record.running:  # this case ended the process
            reason = "its process was ended: no time was left" if code is None else f"exit code {code}"
            record.end(record.running, FAILED, error=reason)
            print_case(record, list(record.cases)[-1])
        elif record is None or code not in (0, None, EXIT_CARD_LOST):
            print(last_line(log_path(options.out, number)), file=sys.stderr)
            return 1
        if code in (0, None):
            return report(record)


def watch(options: argparse.Namespace, number: int, ends: float) -> int | None:
    """Run the process of a part and print its cases; returns its exit code, or None if it had to be ended."""
    minutes = max(0.0, ends - time.monotonic()) / 60
    words = [sys.executable, __file__, "--child", str(number), "--out", str(options.out)]
    words += ["--minutes", str(minutes), *(["--quick"] if options.quick else [])]
    words += ["--data_path", options.data_path] if options.data_path else []
    shown = set(record.cases) if (record := Record.read(options.out, number)) else set()
    with log_path(options.out, number).open("a", encoding="utf-8") as log:
        child = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None and time.monotonic() < ends + GRACE_SECONDS:
                time.sleep(0.3)
                print_new(options.out, number, shown)
            return child.poll()
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
            print_new(options.out, number, shown)


def print_new(folder: Path, number: int, shown: set[str]) -> None:
    """Print the cases that have ended since the last call."""
    record = Record.read(folder, number)
    for name in record.cases if record else ():
        if name not in shown:
            shown.add(name)
            print_case(record, name)


def print_case(record: Record, name: str) -> None:
    """Print how a case ended."""
    case = record.cases[name]
    detail = "".join(case.get("error", "").splitlines()[:1]) or case.get("result", {}).get("verdict", "")
    print(f"  {case['status']:<12} {case['seconds']:>6.1f} s  {name}  {detail}".rstrip(), flush=True)


def report(record: Record) -> int:
    """Print how many cases are done; returns 0 if all are, and right."""
    states = [case["status"] for case in record.cases.values()]
    failed, not_reached = states.count(FAILED), states.count(NOT_REACHED)
    print(
        f"  {len(states) - failed - not_reached} done, {failed} failed, {not_reached} not reached", flush=True
    )
    return 1 if record.problems() else 0


def log_path(folder: Path, number: int) -> Path:
    """What the process of a part prints."""
    return folder / f"part_{number}.log"


def last_line(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"{path} is empty"


if __name__ == "__main__":
    end_process(main())
