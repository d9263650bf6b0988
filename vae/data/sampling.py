"""The order of images as a function of (seed, epoch, step), so resuming needs only the position."""

from collections.abc import Iterator

import numpy as np


def epoch_order(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """Order of the images in one epoch: a permutation of 0..num_images-1, int64.

    Sorts raw PCG64 words: NumPy keeps them identical across versions and machines, but does not promise this
    for `permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_images)
    return np.argsort(words, kind="stable").astype(np.int64)


def steps_per_epoch(num_images: int, local_batch: int, world_size: int = 1) -> int:
    """Number of full batches in one epoch; the remaining images are not used in that epoch."""
    return num_images // (local_batch * world_size)


class StepSampler:
    """Batches of (epoch, index) keys for one rank, from any step of an epoch to its end.

    Step s of an epoch uses `order[s * G : (s + 1) * G]` with G = local_batch * world_size; rank r gets the
    r-th of its `world_size` equal slices. `local_batch` counts the images per device and optimizer step.
    """

    def __init__(self, num_images: int, local_batch: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        assert 0 <= rank < world_size
        self.num_images = num_images
        self.local_batch = local_batch
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.first_step = 0

    def start_at(self, epoch: int, first_step: int = 0) -> None:
        """Set the position of the next iteration."""
        assert 0 <= first_step <= steps_per_epoch(self.num_images, self.local_batch, self.world_size)
        self.epoch, self.first_step = epoch, first_step

    def __len__(self) -> int:
        return steps_per_epoch(self.num_images, self.local_batch, self.world_size) - self.first_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first_step, steps = self.epoch, self.first_step, len(self)
        order = epoch_order(self.num_images, self.seed, epoch)
        global_batch = self.local_batch * self.world_size
        for step in range(first_step, first_step + steps):
            start = step * global_batch + self.rank * self.local_batch
            yield [(epoch, int(index)) for index in order[start : start + self.local_batch]]
