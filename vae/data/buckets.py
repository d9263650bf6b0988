"""Aspect buckets: a few shapes of about S x S pixels, and an order whose batches have one shape each.

Shapes are (height, width) in px. Aspects are the logarithms of width / height; NaN if a size is unknown.
"""

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vae.data.sampling import Order

MAX_ASPECT = 2.0  # 1:2 to 2:1; images beyond it are cropped

Shape = tuple[int, int]


class Buckets(NamedTuple):
    """The shapes of a stage, from narrow to wide, and the number of the shape of each image: uint8 (N,)."""

    shapes: tuple[Shape, ...]
    codes: np.ndarray

    def shape_of(self, index: int) -> Shape:
        """The shape of the crops of an image."""
        return self.shapes[self.codes[index]]


def bucket_shapes(image_size: int, factor: int, count: int) -> list[Shape]:
    """At most `count` shapes from narrow to wide, at equal ratios, of at most image_size^2 pixels.

    Each side is a multiple of `factor`, as `image_size` is. An odd `count` includes the square.
    """
    found: list[Shape] = []
    for number in range(count):
        aspect = MAX_ASPECT ** ((2 * number + 1) / count - 1)  # the middle of equal parts of the range
        long = factor * round(image_size * math.sqrt(max(aspect, 1 / aspect)) / factor)
        short = image_size**2 // long // factor * factor
        if short:
            found.append((short, long) if aspect >= 1 else (long, short))
    return list(dict.fromkeys(found))


def assign(aspects: np.ndarray, shapes: Sequence[Shape], least: int) -> Buckets:
    """The nearest shape of each image. One with fewer than `least` images is left out."""
    shapes = list(shapes)
    while True:
        centres = np.array([math.log(width / height) for height, width in shapes])
        between = (centres[1:] + centres[:-1]) / 2
        codes = np.searchsorted(between, np.nan_to_num(aspects)).astype(np.uint8)
        counts = np.bincount(codes, minlength=len(shapes))
        rarest = int(counts.argmin())
        if counts[rarest] >= least or len(shapes) == 1:
            return Buckets(tuple(shapes), codes)
        del shapes[rarest]


class BucketOrder:
    """Another order in global batches of one shape, as a function of (seed, epoch, step).

    Every shape has as many batches in each epoch as its images fill. Batches come in the order in which
    their last image comes in the other order. With streams, the image at place j of a batch is of a stream
    that is j modulo every possible number of processes, so a process still reads its own streams only; a
    stream that has too few images of a shape in an epoch repeats some of them. The few images that the other
    order leaves out come last.
    """

    def __init__(self, order: Order, codes: np.ndarray, global_batch: int):
        """`codes`: the number of the shape of each image."""
        self.num_streams = order.num_streams
        self.base = order
        self._codes = codes
        self._batch = global_batch
        self._batches = np.bincount(codes) // global_batch  # of each shape
        self._classes = math.gcd(order.num_streams, global_batch) if order.num_streams else 1
        self._computed = lru_cache(maxsize=2)(self._whole)
        self._lock = threading.Lock()  # a thread loads batches while another one asks where they are

    def __len__(self) -> int:
        return int(self._batches.sum()) * self._batch

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        return self._samples(epoch)[0][first : first + step * count : step].tolist()

    def whole(self, epoch: int) -> np.ndarray:
        """All images of an epoch, int64."""
        return self._samples(epoch)[0]

    def base_position(self, epoch: int, position: int) -> int:
        """The position in the other order of the last image of the batch at this position."""
        last = self._samples(epoch)[1]
        return min(int(last[min(position // self._batch, len(last) - 1)]), len(self.base) - 1)

    def _samples(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            return self._computed(epoch)

    def _whole(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        images = self.base.whole(epoch)
        is_left_out = np.ones(len(self._codes), bool)
        is_left_out[images] = False
        images = np.concatenate([images, np.flatnonzero(is_left_out)])
        codes = self._codes[images]
        shapes = [number for number, batches in enumerate(self._batches) if batches]
        parts = [self._batches_of(np.flatnonzero(codes == number), number) for number in shapes]
        places = np.concatenate(parts)  # (batches, images of a batch) in the other order
        last = places.max(axis=1)
        in_order = np.argsort(last, kind="stable")
        return images[places[in_order]].reshape(-1), last[in_order]

    def _batches_of(self, places: np.ndarray, number: int) -> np.ndarray:
        """The batches of a shape, whose images are at these places of the other order."""
        batches, classes = int(self._batches[number]), self._classes
        columns = []
        for residue in range(classes):
            own = places[places % classes == residue]
            columns.append(np.resize(own if len(own) else places, batches * self._batch // classes))
        return np.stack(columns, axis=1).reshape(batches, self._batch)
