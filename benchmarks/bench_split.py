#!/usr/bin/env python3
"""Time --mode split of a large manifest, and compare it with only reading and writing the manifest.

`--overlaps N` measures instead the search for overlapping crops among N images that all differ.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.config.prepare_flags import SplitConfig  # noqa: E402
from vae.data.manifest import format_row, read_rows  # noqa: E402
from vae.prepare.demo.draw import draw_image  # noqa: E402
from vae.prepare.keypoints import HEADER, STORED, find_keypoints  # noqa: E402
from vae.prepare.overlaps import join_overlapping  # noqa: E402
from vae.prepare.split.run import split_manifest  # noqa: E402

DRAWN = 50  # images whose keypoints are varied
FLIPS = 0.3  # share of the signs that a variation changes: so many that no two keypoints match


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


def vary_keypoints(count: int) -> list[bytes]:
    """Keypoints of `count` images: those of a few drawn images with random changes of their hashes."""
    chance = np.random.default_rng(0)
    drawn = [find_keypoints(Image.fromarray(draw_image(160, 5, index))) for index in range(DRAWN)]
    varied = []
    for number in range(count):
        packed = drawn[number % DRAWN]
        stored = np.frombuffer(packed, STORED, offset=HEADER.size).copy()
        flips = np.packbits(chance.random((len(stored), 64)) < FLIPS, axis=1)
        stored["hash"] ^= flips.view("<u8")[:, 0]
        varied.append(packed[: HEADER.size] + stored.tobytes())
    return varied


def measure_overlaps(count: int) -> dict[str, float]:
    """CPU seconds and memory of the search for overlaps among `count` images."""
    keypoints = vary_keypoints(count)
    hashes = np.arange(2 * count, dtype=np.uint64).reshape(-1, 2)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    clusters = join_overlapping(np.arange(count), hashes, keypoints)
    seconds = time.process_time() - began
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    joined = count - len(np.unique(clusters))
    size = {"images": count, "kb_per_image": round(kilobytes / count, 1)}
    return {**size, "cpu_seconds": round(seconds, 2), "joined": joined}


def main() -> None:
    """Print a JSON object: seconds of the split and of a copy of the manifest row by row, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--labels", type=int, default=10)
    parser.add_argument("--overlaps", type=int, metavar="N", help="search N images for overlaps")
    options = parser.parse_args()
    if options.overlaps:
        print(json.dumps(measure_overlaps(options.overlaps)))
        return
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
