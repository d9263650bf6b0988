#!/usr/bin/env python3
"""What --buckets costs: the order of an epoch, and crops that are scaled to their shape instead of cut out.

`order` computes one epoch for drawn aspects: CPU seconds, peak bytes for each image, and the share of images
that the epoch contains (streams repeat some and leave some out). `crops` decodes drawn JPEG files of 3:2.
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
from vae.data.buckets import BucketOrder, Buckets, assign, bucket_shapes  # noqa: E402
from vae.data.dataset import CropDataset, FolderImages  # noqa: E402
from vae.data.image_sizes import aspects, image_sizes  # noqa: E402
from vae.data.sampling import ShuffledOrder  # noqa: E402
from vae.data.streams import StreamOrder  # noqa: E402
from vae.prepare.demo.draw import draw_image  # noqa: E402

SHARD = 5000  # images of a shard
STREAMS = 64
SPREAD = 0.35  # standard deviation of log(width / height): two thirds of the images from 0.7 to 1.4
SIDES = 1536, 1024  # of the drawn files


def order_line(images: int, batch: int, shapes: int, streams: bool) -> str:
    """One row of the table of orders."""
    drawn = np.random.default_rng(0).normal(0, SPREAD, images).astype(np.float32)
    buckets = assign(drawn, bucket_shapes(512, 8, shapes), batch)
    counts = [SHARD] * (images // SHARD)
    base = StreamOrder(counts, STREAMS, 0) if streams else ShuffledOrder(images, 0)
    order = BucketOrder(base, buckets.codes, batch)
    tracemalloc.start()
    started = time.process_time()
    whole = order.whole(1)
    seconds = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1] / images
    tracemalloc.stop()
    distinct = len(np.unique(whole)) / images
    kind = f"{STREAMS} streams" if streams else "folder"
    return f"{kind:10} | {images:9,} | {batch:5} | {seconds:6.2f} s | {peak:4.0f} B | {distinct:.2%}"


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
    found = aspects(image_sizes(images, range(files)))
    buckets: Buckets = assign(found, bucket_shapes(image_size, 8, 9), 1)
    plain = CropDataset(images, image_size=image_size)
    scaled = CropDataset(images, image_size=image_size, buckets=buckets)
    one, other = crop_ms(plain, rounds), crop_ms(scaled, rounds)
    size = "x".join(map(str, reversed(buckets.shape_of(0))))
    return f"{image_size} px | crop {one:.1f} ms | scaled to {size} {other:.1f} ms | ratio {one / other:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[100_000, 1_000_000])
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
