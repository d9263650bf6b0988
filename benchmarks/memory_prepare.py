#!/usr/bin/env python3
"""Measure the peak memory of prepare_data.py for few and many files, all links to a hundred small images."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.prepare.demo.draw import draw_image  # noqa: E402

ORIGINALS = 100


def make_folder(root: Path, count: int, in_folder: int) -> Path:
    """A folder with `count` links to a hundred images of 64 px, `in_folder` links per subfolder."""
    originals = root / "originals"
    originals.mkdir(exist_ok=True)
    folder = root / f"files_{count}"
    for index in range(ORIGINALS):
        if not (originals / f"{index}.jpg").exists():
            Image.fromarray(draw_image(64, 0, index)).save(originals / f"{index}.jpg", quality=90)
    for index in range(count):
        subfolder = folder / f"{index // in_folder:04d}"
        if index % in_folder == 0:
            subfolder.mkdir(parents=True)
        os.link(originals / f"{index % ORIGINALS}.jpg", subfolder / f"{index:08d}.jpg")
    return folder


def measure(command: list[str]) -> dict:
    """Peak resident MiB of the process of a command and of its largest process, and its seconds."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        own, largest = 0.0, 0.0
        while process.poll() is None:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            try:
                own = max(own, _peak(process.pid))
                largest = max([largest, own, *(_peak(int(child)) for child in children.read_text().split())])
            except (OSError, IndexError):  # one of the processes has just ended
                pass
            time.sleep(0.1)
        log.seek(0)
        assert process.returncode == 0, log.read().decode()[-2000:]
    return {
        "own_mib": round(own),
        "largest_process_mib": round(largest),
        "seconds": round(time.monotonic() - start),
    }


def _peak(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Measure all modes with all numbers of files and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--modes", nargs="+", default=["validate", "preprocess"])
    parser.add_argument("--in_folder", type=int, default=20_000, help="files per subfolder")
    parser.add_argument("--num_workers", type=int, default=2)
    arguments = parser.parse_args()
    result: dict = {}
    with tempfile.TemporaryDirectory() as work:
        for count in arguments.counts:
            folder = make_folder(Path(work), count, arguments.in_folder)
            for mode in arguments.modes:
                command = [sys.executable, "prepare_data.py", "--mode", mode, "--input_dir", str(folder)]
                command += ["--num_workers", str(arguments.num_workers)]
                if mode == "validate":
                    command += ["--output_file", f"{work}/report.json"]
                else:
                    command += ["--output_dir", f"{work}/out_{count}", "--target_size", "32"]
                result.setdefault(mode, {})[count] = measure(command)
                print(mode, count, result[mode][count], file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
