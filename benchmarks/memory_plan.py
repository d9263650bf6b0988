#!/usr/bin/env python3
"""Predicted and reserved memory of train_vae.py on a card, per image size and recompute level.

    python benchmarks/memory_plan.py --data_path PHOTOGRAPHS
    python -m tests.null_gpu --gib 80 python benchmarks/memory_plan.py --data_path data/demo --sizes 512

Each row is three steps of two images, one at a time, in bf16, eager and compiled. Further flags are those of
train_vae.py.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.on_card.result import read_profile  # noqa: E402
from vae.config.options import RECOMPUTE  # noqa: E402

TRAINER = "--upscale --perceptual_net random --use_bf16 --batch_size 2 --micro_batch_size 1 --max_steps 3"
TRAINER += " --val_split 0 --save_samples_freq 0 --log_freq 1"
TIMEOUT_SECONDS = 1800  # of a row: compilation takes minutes


def measure(size: int, compiled: bool, level: str, flags: list[str]) -> dict[str, Any]:
    """One row: what the trainer predicts and reserves, or why it does not train."""
    row = {"image_size": size, "compiled": compiled, "recompute": level}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "train_vae.py", "--output_dir", f"{folder}/run", "--image_size", str(size)]
        words += ["--recompute", level, *["--use_torch_compile"] * compiled, *TRAINER.split(), *flags]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        if done.returncode:
            return row | {"failure": (done.stderr.strip() or "no message").splitlines()[-1]}
        found = read_profile(Path(folder), done.stdout)
    return row | {name: found[name] for name in ("predicted_gib", "reserved_gib")}


def table_line(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"| {row['image_size']} | {'compiled' if row['compiled'] else 'eager'} | {row['recompute']} |"
    if "failure" in row:
        return f"{head} {row['failure']} | | |"
    predicted, reserved = row["predicted_gib"], row["reserved_gib"]
    return f"{head} {predicted:.2f} | {reserved:.2f} | {reserved / predicted - 1:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048], help="px")
    parser.add_argument("--levels", nargs="+", choices=RECOMPUTE, default=RECOMPUTE, metavar="LEVEL")
    parser.add_argument("--eager", action="store_true", help="without compiled rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    given, flags = parser.parse_known_args()
    print("| px | mode | recompute | predicted GiB | reserved GiB | difference |\n|---|---|---|---|---|---|")
    rows = []
    for size, compiled, level in itertools.product(given.sizes, (False, True), given.levels):
        if not (compiled and given.eager):
            rows.append(measure(size, compiled, level, flags))
            print(table_line(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
