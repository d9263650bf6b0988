"""Aspect buckets: a few shapes of about S x S pixels, and an order of a folder in batches of one shape.

Shapes are (height, width) in px. Aspects are the logarithms of width / height; NaN if a size is unknown.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vae.sampling.order import ShuffledOrder

MAX_ASPECT = 2.0  # 1:2 to 2:1; images beyond it are cropped

Shape = tuple[int, int]


class Buckets(NamedTuple):
    """The shapes of a stage, from narrow to wide, and the number of the shape of some images: uint8 (N,).

    Of all images of a folder; of a sample of a dataset of shards.
    """

    shapes: tuple[Shape, ...]
    codes: np.ndarray

    def nearest(self, sizes: np.ndarray) -> np.ndarray:
        """The number of the nearest shape for each width and height (N, 2): uint8 (N,)."""
        return _nearest(aspects(sizes), self.shapes)


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


def aspects(sizes: np.ndarray) -> np.ndarray:
    """The logarithm of width / height: float32 (N,); NaN for unknown sizes."""
    wide = sizes.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(wide[:, 0] / wide[:, 1])
    return np.where(np.isfinite(ratio), ratio, np.nan).astype(np.float32)


def _nearest(aspects: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    centres = np.array([math.log(width / height) for height, width in shapes])
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, np.nan_to_num(aspects)).astype(np.uint8)


def assign(aspects: np.ndarray, shapes: Sequence[Shape], least: float) -> Buckets:
    """The nearest shape of each image. One with fewer than `least` images is left out."""
    shapes = list(shapes)
    while True:
        codes = _nearest(aspects, shapes)
        counts = np.bincount(codes, minlength=len(shapes))
        rarest = int(counts.argmin())
        if counts[rarest] >= least or len(shapes) == 1:
            return Buckets(tuple(shapes), codes)
        del shapes[rarest]


class BucketOrder:
    """The order of a folder in global batches of one shape, as a function of (seed, epoch, step).

    Every shape has as many batches in each epoch as its images fill. Batches come in the order in which
    their last image comes in the order without shapes. It needs memory for an epoch.
    """

    num_streams: int | None = None

    def __init__(self, order: ShuffledOrder, buckets: Buckets, global_batch: int):
        """`buckets`: of all images."""
        self._order, self._buckets, self._batch = order, buckets, global_batch
        self._batches = np.bincount(buckets.codes) // global_batch  # of each shape
        self.whole = lru_cache(maxsize=1)(self._whole)  # all images of an epoch, int64

    def __len__(self) -> int:
        return int(self._batches.sum()) * self._batch

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        return self.whole(epoch)[first : first + step * count : step].tolist()

    def shape(self, epoch: int, position: int) -> Shape:
        """The shape of the batch at a position."""
        return self._buckets.shapes[self._buckets.codes[self.whole(epoch)[position]]]

    def _whole(self, epoch: int) -> np.ndarray:
        images = self._order.whole(epoch)
        codes = self._buckets.codes[images]
        parts = [
            np.flatnonzero(codes == number)[: batches * self._batch].reshape(-1, self._batch)
            for number, batches in enumerate(self._batches)
        ]
        places = np.concatenate(parts)  # (batches, images of a batch) in the order without shapes
        return images[places[np.argsort(places.max(axis=1), kind="stable")]].reshape(-1)
