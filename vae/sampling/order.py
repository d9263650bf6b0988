"""The order of images as a function of (seed, epoch, step), so resuming needs only the position."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

import numpy as np


class Order(Protocol):
    """The order of the images of a set in each epoch; its length is the number of images of an epoch."""

    @property
    def num_streams(self) -> int | None:
        """What a number of processes should divide; None: it does not matter."""
        ...

    def __len__(self) -> int: ...

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        ...

    def shape(self, epoch: int, position: int) -> tuple[int, int] | None:
        """Height and width of the crops of the batch at a position; None: squares of --image_size."""
        ...


Key = tuple[int, int, tuple[int, int] | None]  # of a crop: epoch, image, and its shape (None: a square)


def permutation(count: int, entropy: list[int]) -> np.ndarray:
    """A permutation of 0..count-1 as a function of `entropy`, int64.

    Sorts raw PCG64 words: NumPy keeps them identical across versions and machines, but does not promise this
    for its own `permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


class ShuffledOrder:
    """All images of a set, permuted in each epoch."""

    num_streams: int | None = None

    def __init__(self, num_images: int, seed: int):
        self._num_images = num_images
        self._permutation = lru_cache(maxsize=1)(lambda epoch: permutation(num_images, [seed, epoch]))

    def __len__(self) -> int:
        return self._num_images

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        return self._permutation(epoch)[first : first + step * count : step].tolist()

    def take(self, epoch: int, first: int, count: int, step: int) -> np.ndarray:
        """As `samples`, for many of them: int64."""
        return self._permutation(epoch)[first : first + step * count : step]

    def block_length(self, _least: int) -> int:
        """The positions of an epoch."""
        return self._num_images

    def shape(self, _epoch: int, _position: int) -> None:
        """Crops are squares."""


def steps_per_epoch(num_images: int, local_batch: int, world_size: int = 1) -> int:
    """Number of full batches in one epoch; the remaining images are not used in that epoch."""
    return num_images // (local_batch * world_size)


class StepSampler:
    """Batches of keys (epoch, image, shape) for one rank, from any step of an epoch to its end.

    Step s of an epoch has the positions s * G to (s + 1) * G of the order, with G = local_batch * world_size.
    Rank r gets every world_size-th of them, from the r-th on. `local_batch` counts the images per device and
    optimizer step.
    """

    def __init__(self, order: Order, local_batch: int, rank: int = 0, world_size: int = 1):
        assert 0 <= rank < world_size
        self.order = order
        self.local_batch = local_batch
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first_step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in one epoch."""
        return steps_per_epoch(len(self.order), self.local_batch, self.world_size)

    def start_at(self, epoch: int, first_step: int = 0) -> None:
        """Set the position of the next iteration."""
        assert 0 <= first_step <= self.steps_per_epoch
        self.epoch, self.first_step = epoch, first_step

    def __len__(self) -> int:
        return self.steps_per_epoch - self.first_step

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first_step, steps = self.epoch, self.first_step, len(self)
        global_batch = self.local_batch * self.world_size
        for step in range(first_step, first_step + steps):
            first = step * global_batch + self.rank
            samples = self.order.samples(epoch, first, self.local_batch, self.world_size)
            shape = self.order.shape(epoch, first)
            yield [(epoch, index, shape) for index in samples]
