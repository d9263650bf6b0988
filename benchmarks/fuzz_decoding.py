#!/usr/bin/env python3
"""Check damaged image files in the same way as --mode validate: outcomes, time and memory."""

import argparse
import io
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from vae.config.prepare_flags import ReadingConfig
from vae.prepare.check_file import decode_each
from vae.prepare.demo.draw import draw_image
from vae.prepare.pool import Failure
from vae.prepare.validate.validate_images import check_file

KINDS = {
    "a.jpg": ("JPEG", {"quality": 90}),
    "b.jpg": ("JPEG", {"progressive": True}),
    "a.png": ("PNG", {}),
    "b.png": ("PNG", {"palette": True}),
    "a.webp": ("WEBP", {"quality": 90}),
    "b.webp": ("WEBP", {"lossless": True}),
    "a.tif": ("TIFF", {}),
    "b.tif": ("TIFF", {"compression": "tiff_lzw"}),
    "c.tif": ("TIFF", {"compression": "jpeg"}),
}
MUTATIONS = ("cut", "flip", "splice", "zero", "repeat", "header")


def originals() -> dict[str, bytes]:
    """A small image file in each format."""
    image = Image.fromarray(draw_image(96, 0, 0))
    files = {}
    for name, (kind, options) in KINDS.items():
        buffer = io.BytesIO()
        source = image.quantize(64) if options.get("palette") else image
        source.save(buffer, kind, **{key: value for key, value in options.items() if key != "palette"})
        files[name] = buffer.getvalue()
    return files


def mutate(whole: bytes, other: bytes, turn: int, generator: np.random.Generator) -> bytes:
    """One damaged copy: cut, flipped, spliced with another file, zeroed, repeated or with a bad header."""
    data = bytearray(whole)
    at, end = sorted(int(value) for value in generator.integers(0, len(data), 2))
    kind = MUTATIONS[turn % len(MUTATIONS)]
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        for position in generator.integers(0, len(data), int(generator.integers(1, 20))):
            data[int(position)] ^= 1 << int(generator.integers(8))
    elif kind == "splice":
        data[at:] = other[min(at, len(other)) :]
    elif kind == "zero":
        data[at:end] = bytes(end - at)
    elif kind == "repeat":
        data[at:at] = data[at:end]
    else:  # the first bytes contain sizes, counts and offsets
        for position in generator.integers(0, min(400, len(data)), int(generator.integers(1, 6))):
            data[int(position)] = int(generator.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF]))
    return bytes(data)


def fuzz(count: int, seed: int, num_workers: int, folder: Path) -> dict:
    """Write `count` damaged files and check them; return outcomes, times and memory."""
    generator, files = np.random.default_rng(seed), originals()
    names = list(files)
    for index in range(count):
        name = names[index % len(names)]
        other = files[names[int(generator.integers(len(names)))]]
        damaged = mutate(files[name], other, index // len(names), generator)
        (folder / f"{index:05d}_{name}").write_bytes(damaged)
    config = ReadingConfig(
        input_dir=str(folder), max_pixels=20_000_000, time_limit=10, num_workers=str(num_workers)
    )
    outcomes: Counter[str] = Counter()
    start = last = time.perf_counter()
    slowest = 0.0
    check = partial(check_file, config)
    names_on_disk = sorted(path.name for path in folder.iterdir())
    with closing(decode_each(check, names_on_disk, config)) as results:
        for _, result in results:
            now = time.perf_counter()
            slowest, last = max(slowest, now - last), now
            failed = isinstance(result, Failure)
            outcomes[result.reason if failed or result.reason else "accepted"] += 1
    return {
        "mutations": count,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "longest_wait_seconds": round(slowest, 2),
        "largest_process_mib": round(_largest_child_mib()),
        "outcomes": dict(outcomes.most_common()),
    }


def _largest_child_mib() -> float:
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def main() -> None:
    """Check damaged files and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(arguments.count, arguments.seed, arguments.num_workers, Path(folder))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
