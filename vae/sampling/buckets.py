"""Aspect buckets: a few shapes of about S x S pixels, and an order in batches of one shape.

Shapes are (height, width) in px. Aspects are the logarithms of width / height; NaN if a size is unknown.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from vae.sampling.order import ShuffledOrder, StreamOrder

MAX_ASPECT = 2.0  # 1:2 to 2:1; images beyond it are cropped
MIN_BATCHES = 32  # in a block, if an epoch has so many: the last batches of a block are squares

Shape = tuple[int, int]


def bucket_shapes(image_size: int, factor: int, count: int) -> list[Shape]:
    """At most `count` shapes from narrow to wide, at equal ratios, and the square.

    They have at most image_size^2 pixels. Each side is a multiple of `factor`, as `image_size` is. The square
    fits every image whose short side is at least `image_size`, and so does the nearest shape.
    """
    shapes = [(image_size, image_size)]
    for number in range(count):
        aspect = MAX_ASPECT ** ((2 * number + 1) / count - 1)  # the middle of equal parts of the range
        long = factor * round(image_size * math.sqrt(max(aspect, 1 / aspect)) / factor)
        short = image_size**2 // long // factor * factor
        if short:
            shapes.append((short, long) if aspect >= 1 else (long, short))
    return sorted(set(shapes), key=lambda shape: shape[1] / shape[0])


def aspects(sizes: np.ndarray) -> np.ndarray:
    """The logarithm of width / height: float32 (N,); NaN for unknown sizes."""
    wide = sizes.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(wide[:, 0] / wide[:, 1])
    return np.where(np.isfinite(ratio), ratio, np.nan).astype(np.float32)


def nearest(aspects: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """The number of the nearest shape for each aspect, from narrow to wide: int64 (N,)."""
    centres = np.array([math.log(width / height) for height, width in shapes])
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, np.nan_to_num(aspects))


class BucketOrder:
    """Batches of one shape from the images of another order, as a function of (seed, epoch, step, rank).

    An epoch is cut into blocks: windows of streams, or the whole epoch of a folder. In each, a process puts
    its own images, in their order, into a buffer for each shape; a full buffer is a batch. The images left in
    the buffers at the end of a block make the last batches, as squares. So all processes make the same
    number of batches, and another number of processes makes other ones.
    """

    def __init__(
        self,
        base: StreamOrder | ShuffledOrder,
        aspects_of: Callable[[np.ndarray], np.ndarray],
        shapes: Sequence[Shape],
        local_batch: int,
        world_size: int,
    ):
        """`aspects_of`: the aspects of images by their number."""
        self.base = base
        self.num_streams = base.num_streams
        self._aspects_of = aspects_of
        self._shapes = shapes
        self._local_batch = local_batch
        self._global_batch = local_batch * world_size
        self._world_size = world_size
        self._block = base.block_length(MIN_BATCHES * self._global_batch)
        self._steps = self._block // self._global_batch  # of each block but the last one
        self._batches = lru_cache(maxsize=1)(self._batches_of_block)

    def __len__(self) -> int:
        blocks, rest = divmod(len(self.base), self._block)
        return (blocks * self._steps + rest // self._global_batch) * self._global_batch

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images of a process in a batch, whose first position is `first`; it has every step-th one."""
        assert (count, step) == (self._local_batch, self._world_size)
        return self._batch(epoch, first)[0].tolist()

    def shape(self, epoch: int, position: int) -> Shape:
        """The shape of the batch of the process that has this position."""
        return self._shapes[self._batch(epoch, position)[1]]

    def base_position(self, position: int) -> int:
        """The first position of the other order in the block of the batch at this position."""
        return min(position, len(self) - 1) // self._global_batch // self._steps * self._block

    def _batch(self, epoch: int, position: int) -> tuple[np.ndarray, int]:
        number, rank = divmod(position, self._global_batch)
        block, within = divmod(number, self._steps)
        images, codes = self._batches(epoch, block, rank)
        return images[within], int(codes[within])

    def _batches_of_block(self, epoch: int, block: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The images of the batches of a block, (steps, local batch), and the number of their shapes."""
        first = block * self._block
        positions = min(self._block, len(self.base) - first)
        own = first + (rank - first) % self._world_size
        images = self.base.take(epoch, own, positions // self._world_size, self._world_size)
        codes = nearest(self._aspects_of(images), self._shapes)
        full = full_buffers(codes, self._local_batch)
        rest = remaining_batches(len(images), full)
        square = next(code for code, (height, width) in enumerate(self._shapes) if height == width)
        shapes = [codes[full[:, 0]], np.full(len(rest), square)]
        return images[np.concatenate([full, rest])], np.concatenate(shapes)


def full_buffers(codes: np.ndarray, size: int) -> np.ndarray:
    """Positions (batches, size) of `size` equal codes each, in the order in which such buffers are full."""
    of_code = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    full = np.concatenate([places[: len(places) // size * size] for places in of_code]).reshape(-1, size)
    return full[np.argsort(full[:, -1], kind="stable")]


def remaining_batches(count: int, full: np.ndarray) -> np.ndarray:
    """The positions of `count` that are not in `full`, in order, as batches of the same size."""
    size = full.shape[1]
    rest = np.setdiff1d(np.arange(count), full)
    return rest[: len(rest) // size * size].reshape(-1, size)
