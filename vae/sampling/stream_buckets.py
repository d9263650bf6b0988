"""Batches of one shape from the streams of shards or of a mixture, as a function of (seed, epoch, step).

The windows of one number, of all streams, are a block. How many batches of each shape a block has, and in
which order, follows from the share of the shape in the whole dataset, so every process knows the shape of
every batch. Its images are from the block: the image at place j of a batch of B is of a stream that is j
modulo gcd(streams, B), so a process still reads its own streams only, and keeps their open windows only.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from vae.sampling.buckets import Buckets, Shape
from vae.sampling.mixture import MixtureOrder
from vae.sampling.order import permutation
from vae.sampling.streams import StreamOrder


class StreamBuckets:
    """Another order of a sharded dataset or a mixture, in global batches of one shape.

    A class of streams that has too few images of a shape in a block repeats some of them, and one that has
    too many leaves some out. One that has none takes its images of the nearest shape.
    """

    def __init__(
        self,
        base: StreamOrder | MixtureOrder,
        sizes: Callable[[np.ndarray], np.ndarray],
        buckets: Buckets,
        global_batch: int,
    ):
        """`sizes`: width and height of images by their number. `buckets`: of a sample of the images."""
        self.base, self.num_streams = base, base.num_streams
        self._sizes, self._buckets, self._batch = sizes, buckets, global_batch
        self._classes = math.gcd(base.num_streams, global_batch)
        found = np.bincount(buckets.codes, minlength=len(buckets.shapes)).astype(np.int64)
        batches = found * base.num_images // len(buckets.codes) // global_batch  # of each shape in an epoch
        blocks = -(-base.length // base.window_length)
        done = np.minimum(np.arange(blocks + 1) * base.window_length, base.length)
        self._before = batches * done[:, None] // base.length  # (blocks + 1, shapes): batches before a block
        self._steps = self._before.sum(axis=1)
        self._sequence = lru_cache(maxsize=2)(self._shapes_of_block)
        self._images: dict[int, tuple[tuple[int, int], list[np.ndarray]]] = {}  # of each used class

    def __len__(self) -> int:
        return int(self._steps[-1]) * self._batch

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        found, last = [], -1
        for position in range(first, first + step * count, step):
            number, place = divmod(position, self._batch)
            if number != last:  # the same for all images of a batch
                (block, code, rank), last = self._place(epoch, number), number
            within, of_class = divmod(place, self._classes)
            images = self._images_of(epoch, block, of_class)[code]
            found.append(int(images[(rank * (self._batch // self._classes) + within) % len(images)]))
        return found

    def shape(self, epoch: int, position: int) -> Shape:
        """The shape of the batch at a position."""
        return self._buckets.shapes[self._place(epoch, position // self._batch)[1]]

    def base_position(self, position: int) -> int:
        """The first position of the other order in the block of the batch at this position."""
        block = self._block(min(position // self._batch, int(self._steps[-1]) - 1))
        return block * self.base.window_length * self.num_streams

    def _place(self, epoch: int, number: int) -> tuple[int, int, int]:
        """The block of a batch, its shape, and how many batches of the block come before with this shape."""
        block = self._block(number)
        codes, ranks = self._sequence(epoch, block)
        within = number - int(self._steps[block])
        return block, int(codes[within]), int(ranks[within])

    def _block(self, number: int) -> int:
        return int(np.searchsorted(self._steps, number, side="right")) - 1

    def _shapes_of_block(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The shapes of the batches of a block, and the number of each among those of its shape."""
        counts = self._before[block + 1] - self._before[block]
        total, shapes = int(counts.sum()), np.arange(len(counts))
        entropy = [self.base.seed, epoch, 1 + self.num_streams, block]  # no stream has this number
        codes = np.repeat(shapes, counts)[permutation(total, entropy)]
        ranks = np.empty(total, np.int64)
        ranks[np.argsort(codes, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
        return codes, ranks

    def _images_of(self, epoch: int, block: int, of_class: int) -> list[np.ndarray]:
        """The images of a class of streams in a block, for each shape."""
        found, parts = self._images.get(of_class, (None, None))
        if parts is None or found != (epoch, block):
            streams = range(of_class, self.num_streams, self._classes)
            windows = [self.base.window_samples(epoch, stream, block) for stream in streams]
            images = np.stack(windows, axis=1).reshape(-1)
            codes = self._buckets.nearest(self._sizes(images))
            used = np.unique(codes)
            nearest = [int(used[np.abs(used - code).argmin()]) for code in range(len(self._buckets.shapes))]
            parts = [images[codes == code] for code in nearest]
            self._images[of_class] = (epoch, block), parts
        return parts
