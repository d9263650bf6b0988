"""The result of a case, written again after each row: a case may be ended at any time. And its verdict."""

import argparse
import json
import math
import re
import time
import traceback
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vae.system.files import read_json, read_json_lines, write_json

LATE = "ok, ended at its limit"


def flags(description: str | None) -> argparse.ArgumentParser:
    """The flags of every program here; benchmarks/card.py sets them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file of the result")
    parser.add_argument("--seconds", type=float, default=60.0, help="nothing new starts after them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: kernels, steps")
    parser.add_argument("--small", action="store_true", help="small networks and images, to try the program")
    return parser


class Result:
    """Rows, a line for the summary and a verdict, in the file --out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = options.out
        self.end = time.monotonic() + options.seconds
        self.rows: list[dict[str, Any]] = []

    def seconds_left(self) -> float:
        """Seconds until the case has to end."""
        return self.end - time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, and print it for the log."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def write(self, line: str, verdict: str) -> None:
        """Replace the file; `verdict` is "ok", LATE, "WRONG", or "-" for figures without a right value."""
        write_json(self.path, {"line": line, "verdict": verdict, "rows": self.rows})


def first_line(error: BaseException) -> str:
    """Type and first line of an error, or the line of code that raised it; at most 200 characters."""
    text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"[:200]


# ---- Verdicts ----------------------------------------------------------------------------------------------
# On what the trainer and pytest leave: functions of the folder of a case and of what it printed. Each returns
# a line for the summary, a verdict, "ok" or "WRONG", and figures. ValueError: it left no figures.
Found = dict[str, Any]
MEMORY_SHARE = 0.05  # of the predicted peak: docs/memory.md, "How reliable the plan is"
MEMORY_GIB = 0.3  # for small networks: a few segments of PyTorch's allocator
WARMUP_STEPS = 3  # cuDNN's search and the first growth of the allocator may retry
PSNR_DB = 0.1  # that the EMA of a warm start may lose at first: benchmarks/LOG.md, "the start of a run"
REPLACED = r"^.*(?:out of memory|PyTorch operations replace|only slower).*$"


def read_result(folder: Path, printed: str) -> Found:
    """What a program of benchmarks/on_card has written so far."""
    path = folder / "result.json"
    if not path.exists():
        raise ValueError("no result was written")
    return read_json(path)


def read_profile(folder: Path, printed: str) -> Found:
    """Whether a profile reserves the predicted memory, without retries or replaced kernels; its speed."""
    train = _records(folder, "train")
    plan = re.search(r"^plan +(.*?): predicted peak ([\d.]+) GiB", printed, re.M)
    if plan is None or not train or "memory_reserved_gib" not in train[-1]:
        raise ValueError("the trainer printed no plan, or made no step on a card")
    predicted = float(plan[2])
    reserved = max(record["memory_reserved_gib"] for record in train)  # the peak so far, in each record
    warm = train[min(WARMUP_STEPS, len(train)) - 1]
    retries = train[-1]["memory_retries"] - warm["memory_retries"]
    losses = [record["loss"] for record in train]
    speed = median(record["images_per_second"] for record in train[len(train) // 2 :])
    problems = re.findall(REPLACED, printed, re.M)
    is_close = abs(reserved - predicted) <= max(MEMORY_SHARE * predicted, MEMORY_GIB)
    is_right = is_close and not retries and not problems and _are_finite(losses)
    line = f"{plan[1]}: predicted {predicted:.2f}, reserved {reserved:.2f} GiB, {retries} retries after "
    line += f"{WARMUP_STEPS} of {len(train)} steps, {speed:.2f} images/s, loss {losses[0]} -> {losses[-1]}"
    line += "".join(f"; {problem[:150]}" for problem in problems[:1])
    figures = {"predicted_gib": predicted, "reserved_gib": reserved, "images_per_second": speed}
    return {"line": line, "verdict": "ok" if is_right else "WRONG", **figures, "losses": losses}


def read_learning(folder: Path, printed: str) -> Found:
    """Whether the loss falls from the first to the last quarter of a run, and the validated PSNR does not."""
    train = _records(folder, "train")
    if not train:
        raise ValueError("metrics.jsonl has no record of a step")
    psnr = [record["psnr"] for record in _records(folder, "validation") if record.get("psnr") is not None]
    losses = [record["loss"] for record in train]
    quarter = max(1, len(losses) // 4)
    is_finite = _are_finite(losses)
    first = fmean(losses[:quarter]) if is_finite else math.nan
    last = fmean(losses[-quarter:]) if is_finite else math.nan
    learned = last < first and len(psnr) > 1 and psnr[-1] > psnr[0] - PSNR_DB
    line = f"{train[-1]['step']} steps, "
    line += f"mean loss of the first and the last quarter {first:.4g} -> {last:.4g}, "
    line += f"PSNR {' -> '.join(f'{value:.2f}' for value in psnr[:1] + psnr[1:][-1:])} dB, "
    line += f"{median(record['images_per_second'] for record in train):.1f} images/s"
    return {"line": line, "verdict": "ok" if learned else "WRONG", "losses": losses, "psnr": psnr}


def read_comparison(folder: Path, printed: str) -> Found:
    """Seconds and GiB of what benchmarks/run.py has measured so far, beside diffusers or PyTorch."""
    cases = read_result(folder, printed)["cases"]
    lines = []
    failed = False
    for case in cases.values():
        ratios = f"theirs / ours {case.get('speed')}, share of the peak {case.get('share_of_bf16_rate')}"
        lines.append(f"{case['title']}: {ratios}")
        for name, row in case["contestants"].items():
            shown = f"{row['seconds']} s" if "seconds" in row else row["failure"]
            lines.append(f"   {name} {shown}, {row.get('allocated_bytes', 0) / 2**30:.2f} GiB")
            failed |= row["side"] == "ours" and row.get("failure") == "out of memory"
    if len(lines) == len(cases):
        raise ValueError("nothing was measured")
    return {"line": "\n".join(lines), "verdict": "WRONG" if failed else "-", "cases": cases}


def read_tests(folder: Path, printed: str) -> Found:
    """Whether pytest passed, and the tests that failed."""
    last = printed.strip().rpartition("\n")[2]
    if not re.search("passed|failed|error|no tests", last):
        raise ValueError("pytest has not ended")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.M)
    is_right = "passed" in last and not failed and not re.search("failed|error", last)
    return {"line": " ".join([last, *failed]), "verdict": "ok" if is_right else "WRONG"}


def _records(folder: Path, kind: str) -> list[Found]:
    path = folder / "run" / "metrics.jsonl"
    records = read_json_lines(path) if path.exists() else ()
    return [record for record in records if record["kind"] == kind]


def _are_finite(losses: list[float | None]) -> bool:
    return all(loss is not None and math.isfinite(loss) for loss in losses)
