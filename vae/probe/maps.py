"""Latents or other maps of labelled images, in batches.

Shapes: N images, V views of each, B images of a batch, Z channels of h x h.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vae.evaluation.image_set import in_threads
from vae.sampling.order import permutation

STATISTICS_IMAGES = 1024  # for the mean and the standard deviation of each channel
VIEW_WORD = 1  # other random words than those for the order


@dataclass(frozen=True)
class MapSet:
    """Latents or other maps with their labels."""

    maps: np.ndarray  # fp16 (N, V, Z, h, h), in memory or on disk
    targets: np.ndarray  # int64 (N,)
    groups: np.ndarray  # int64 (N,); images of one group are not independent
    chosen: np.ndarray  # int64, positions of the images of this set

    def __len__(self) -> int:
        return len(self.chosen)

    def epoch(self, batch_size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All full batches in an order by (seed, epoch), each image in one view; threads read ahead."""
        shuffled = self.chosen[permutation(len(self), [seed, epoch])]
        words = np.random.PCG64(np.random.SeedSequence([seed, epoch, VIEW_WORD])).random_raw(len(self))
        views = (words % np.uint64(self.maps.shape[1])).astype(np.int64)

        def read(at: int) -> tuple[Tensor, Tensor]:
            positions = shuffled[at : at + batch_size]
            order = np.argsort(positions)  # on disk
            maps = np.empty((batch_size, *self.maps.shape[2:]), np.float16)
            maps[order] = self.maps[positions[order], views[at : at + batch_size][order]]
            return torch.from_numpy(maps), torch.from_numpy(self.targets[positions])

        yield from in_threads(read, range(0, len(self) - batch_size + 1, batch_size))

    def in_order(self, batch_size: int) -> Iterator[Tensor]:
        """The first view of all images."""
        starts = range(0, len(self), batch_size)
        yield from in_threads(
            lambda at: torch.from_numpy(self.maps[self.chosen[at : at + batch_size], 0]), starts
        )

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (1, Z, 1, 1) of the channels, of evenly spread images."""
        spread = self.chosen[:: max(1, len(self) // STATISTICS_IMAGES)]
        std, mean = torch.std_mean(torch.from_numpy(self.maps[spread, 0]).double(), (0, 2, 3), keepdim=True)
        return mean.float(), std.clamp(min=1e-6).float()
