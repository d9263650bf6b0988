#!/usr/bin/env python3
"""What --buckets costs: the order of an epoch, and crops that are scaled to their shape instead of cut out.

`order` computes one epoch for drawn sizes: CPU seconds, peak memory, and the share of images that the epoch
contains (streams repeat some and leave some out). `crops` decodes drawn JPEG files of 3:2.
Times are CPU times of this process.
"""

import argparse
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.data.buckets import BucketOrder, Buckets, aspects, assign, bucket_shapes  # noqa: E402
from vae.data.dataset import CropDataset, FolderImages  # noqa: E402
from vae.data.image_sizes import SAMPLE, image_sizes  # noqa: E402
from vae.data.sampling import Order, ShuffledOrder  # noqa: E402
from vae.data.stream_buckets import StreamBuckets  # noqa: E402
from vae.data.streams import StreamOrder  # noqa: E402
from vae.prepare.demo.draw import draw_image  # noqa: E402

SHARD = 5000  # images of a shard
STREAMS = 64
SPREAD = 0.35  # standard deviation of log(width / height): two thirds of the images from 0.7 to 1.4
SIDES = 1536, 1024  # of the drawn files


def order_line(images: int, batch: int, shapes: int, streams: bool) -> str:
    """One row of the table of orders."""
    sizes = np.full((images, 2), 1000, np.int16)
    sizes[:, 0] = 1000 * np.exp(np.random.default_rng(0).normal(0, SPREAD, images))
    some = slice(None, None, max(1, images // SAMPLE) if streams else None)
    buckets = assign(aspects(sizes[some]), bucket_shapes(512, 8, shapes), batch)
    found, seconds = np.zeros(images, bool), 0.0
    for measured in (False, True):  # memory is counted in a second pass, because that takes time
        if measured:
            tracemalloc.start()
        started = time.process_time()
        order: Order = BucketOrder(ShuffledOrder(images, 0), buckets, batch)
        if streams:
            base = StreamOrder([SHARD] * (images // SHARD), STREAMS, 0)
            order = StreamBuckets(base, lambda numbers: sizes[numbers], buckets, batch)
        for first in range(0, len(order) // (4 if measured else 1), batch):
            found[order.samples(1, first, batch)] = True
        seconds = seconds or time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    kind = f"{STREAMS} streams" if streams else "folder"
    return f"{kind:10} | {images:10,} | {batch:5} | {seconds:6.2f} s | {peak:4.0f} MiB | {found.mean():.2%}"


def crop_ms(crops: CropDataset, rounds: int) -> float:
    """Milliseconds of CPU time of one crop: the median of the rounds over all files."""
    times = []
    for epoch in range(rounds):
        started = time.process_time()
        for index in range(len(crops)):
            assert crops[epoch, index].image is not None
        times.append(1000 * (time.process_time() - started) / len(crops))
    return statistics.median(times)


def crops_line(folder: Path, image_size: int, files: int, rounds: int) -> str:
    """Crops at full resolution beside scaled ones, taking turns."""
    for number in range(files):
        image = Image.fromarray(draw_image(max(SIDES), 0, number)).crop((0, 0, *SIDES))
        image.save(folder / f"{number:03}.jpg", quality=95)
    images = FolderImages(folder, sorted(path.name for path in folder.iterdir()))
    found = aspects(image_sizes(images, np.arange(files)))
    buckets: Buckets = assign(found, bucket_shapes(image_size, 8, 9), 1)
    plain = CropDataset(images, image_size=image_size)
    scaled = CropDataset(images, image_size=image_size, buckets=buckets)
    one, other = crop_ms(plain, rounds), crop_ms(scaled, rounds)
    size = "x".join(map(str, reversed(buckets.shapes[buckets.codes[0]])))
    return f"{image_size} px | crop {one:.1f} ms | scaled to {size} {other:.1f} ms | ratio {one / other:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for images in options.images:
        for batch in (64, 256):
            for streams in (False, True):
                print(order_line(images, batch, 9, streams), flush=True)
    for image_size in (256, 512, 1024):
        with tempfile.TemporaryDirectory() as folder:
            print(crops_line(Path(folder), image_size, options.files, options.rounds), flush=True)


if __name__ == "__main__":
    main()
