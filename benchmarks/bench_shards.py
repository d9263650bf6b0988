#!/usr/bin/env python3
"""Images per second from a dataset of shards, divided by those from the folder of the same image files.

Both sides take turns within one run, so that other load affects them equally. A ratio above 1 means that
shards are faster. `bytes` reads each file once without decoding, in the order of each side's epoch; `cold`
removes the files from the page cache first (Linux). Times are CPU times of this process and its workers,
which exclude other programs; `cold` has the wall clock.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.harness.shards import pack  # noqa: E402
from vae.data.dataset import CropDataset, FolderImages, Images  # noqa: E402
from vae.data.folder import list_images  # noqa: E402
from vae.data.loading import TrainLoader  # noqa: E402
from vae.data.shard_images import ShardImages  # noqa: E402
from vae.data.shards import read_dataset  # noqa: E402
from vae.prepare.demo.draw import draw_image  # noqa: E402

QUALITY = 95
CROPS = 5  # per side of a drawn image, at steps of half a crop


def draw_folder(folder: Path, count: int, size: int) -> None:
    """Write `count` different JPEG files of `size` px, cut from drawn images."""
    folder.mkdir(parents=True)
    for number in range(count):
        drawn, place = divmod(number, CROPS**2)
        if place == 0:
            whole = Image.fromarray(draw_image(size * (CROPS + 1) // 2, 0, drawn))
        left, top = (size // 2 * step for step in divmod(place, CROPS))
        whole.crop((left, top, left + size, top + size)).save(folder / f"{number:06}.jpg", quality=QUALITY)


def forget(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cpu_seconds() -> float:
    """CPU time of this process and its worker processes (of this process alone, if this is not Linux)."""
    total = time.process_time()
    for children in Path("/proc/self/task").glob("*/children"):
        for process in children.read_text().split():
            for thread in Path(f"/proc/{process}/task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return total


def byte_reader(images: Images) -> Callable[[int], int]:
    """A function that reads every file in the order of an epoch, and returns the number of bytes."""
    order = images.order(0)

    def read(epoch: int) -> int:
        total = 0
        for index in order.samples(epoch, 0, len(order)):
            if isinstance(images, ShardImages):
                total += len(images.read(index))
            else:
                assert isinstance(images, FolderImages)
                with open(os.path.join(images.root, images.names[index]), "rb") as file:
                    total += len(file.read())
        return total

    return read


def loader_of(images: Images, image_size: int, workers: int) -> TrainLoader:
    """The trainer's loader."""
    dataset = CropDataset(images, image_size=image_size)
    return TrainLoader(dataset, local_batch=8, num_workers=workers)


def compare(
    name: str,
    sides: dict[str, Callable[[int], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = cpu_seconds,
    before: Callable[[str], None] = lambda side: None,
) -> None:
    """Print the ratio of the seconds of two functions that take turns."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-1, rounds):  # the first turn is a warm-up
        for side in sorted(sides, reverse=bool(number % 2)):
            before(side)
            began = clock()
            sides[side](number + 1)
            if number >= 0:
                seconds[side].append(clock() - began)
    ratios = sorted(a / b for a, b in zip(seconds["folder"], seconds["shards"], strict=True))
    medians = {side: round(statistics.median(values), 4) for side, values in seconds.items()}
    spread = [round(ratios[0], 3), round(ratios[-1], 3)]
    ratio = round(statistics.median(ratios), 3)
    clock_name = "CPU" if clock is cpu_seconds else "wall"
    record = {"case": name, "ratio": ratio, "from_to": spread, "clock": clock_name, "seconds": medians}
    print(json.dumps(record), flush=True)


def consume(loader: TrainLoader, epochs: int) -> Callable[[int], object]:
    """A function that takes all batches of so many epochs."""

    def run(turn: int) -> None:
        for epoch in range(turn * epochs, (turn + 1) * epochs):
            for _ in loader.batches(epoch):
                pass

    return run


def main() -> None:
    """Print one JSON object per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_path", help="folder of images; default: drawn images")
    parser.add_argument("--count", type=int, default=1000, help="drawn images")
    parser.add_argument("--size", type=int, default=256, help="side of the drawn images in px")
    parser.add_argument("--image_size", type=int, default=256, help="side of the crops in px")
    parser.add_argument("--shard_mb", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=1, help="epochs of one turn, for small sets")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.data_path or Path(scratch) / "images")
        if not options.data_path:
            draw_folder(folder, options.count, options.size)
        path = pack(folder, Path(scratch) / "set", options.shard_mb * 10**6)
        sharded = ShardImages(read_dataset(path), 64)
        sides: dict[str, Images] = {"folder": FolderImages(folder, list_images(folder)), "shards": sharded}
        places = {"folder": folder, "shards": path.parent}
        print(json.dumps({"images": len(sharded), "shards": len(sharded.dataset.shards)}))
        readers = {side: byte_reader(images) for side, images in sides.items()}
        compare("bytes", readers, options.rounds)
        if hasattr(os, "posix_fadvise"):
            cold = {"clock": time.perf_counter, "before": lambda side: forget(places[side])}
            compare("bytes, cold", readers, options.rounds, **cold)
        for workers in options.workers:
            loaders = {side: loader_of(images, options.image_size, workers) for side, images in sides.items()}
            steps = {side: consume(loader, options.epochs) for side, loader in loaders.items()}
            compare(f"batches, {workers} workers", steps, options.rounds)
            for loader in loaders.values():
                loader.close()


if __name__ == "__main__":
    main()
