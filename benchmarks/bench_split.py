#!/usr/bin/env python3
"""Time --mode split of a large manifest, and compare it with only reading and writing the manifest."""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.config.prepare_flags import SplitConfig  # noqa: E402
from vae.data.manifest import format_row, read_rows  # noqa: E402
from vae.prepare.split.run import split_manifest  # noqa: E402


def write_rows(path: Path, count: int, labels: int) -> None:
    """Write a manifest of `count` rows in groups of up to five, with labels of different frequencies."""
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        group, remaining, label = 0, 0, 0
        for number in range(count):
            if remaining == 0:
                group, remaining, label = (
                    number,
                    generator.randint(1, 5),
                    int(labels * generator.random() ** 2),
                )
            remaining -= 1
            row = {
                "path": f"{number % 7}/{number:07d}.jpg",
                "sha256": f"{generator.getrandbits(256):064x}",
                "width": 64,
                "height": 48,
                "source": f"{number % 7}/{number:07d}.png",
                "flags": [],
                "group": f"g{group}",
                "label": f"l{label}",
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Print a JSON object: seconds of the split and of a copy of the manifest row by row, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--labels", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        manifest = Path(name) / "manifest.jsonl"
        write_rows(manifest, options.rows, options.labels)
        start = time.perf_counter()
        with (Path(name) / "copy.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(format_row(row) for row in read_rows(manifest))
        copied = time.perf_counter() - start
        start = time.perf_counter()
        split_manifest(SplitConfig(input_dir=name, val_split=0.05))
        split = time.perf_counter() - start
    found = {"rows": options.rows, "labels": options.labels, "split_seconds": round(split, 2)}
    print(json.dumps({**found, "copy_seconds": round(copied, 2), "ratio": round(split / copied, 2)}))


if __name__ == "__main__":
    main()
