"""The result of a case: a file that is written again after each row, so a case may be ended at any time."""

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import Any

from vae.system.files import write_json

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
