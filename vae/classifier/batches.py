"""Batches of cached latents, in an order that is a function of (seed, epoch).

Shapes: N images, V views of each, B images of a batch, Z latent channels of h x w.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vae.evaluation.image_set import in_threads
from vae.sampling.order import permutation

STATISTICS_IMAGES = 1024  # for the mean and the standard deviation of each channel
VIEW_WORD = 1  # tells the random words for views from those for the order


@dataclass(frozen=True)
class CachedSet:
    """Latents on disk with their labels."""

    latents: np.ndarray  # fp16 (N, V, Z, h, w)
    targets: np.ndarray  # int64 (N,)
    usable: np.ndarray  # int64, positions of the images that could be encoded

    def __len__(self) -> int:
        return len(self.usable)

    def read(self, positions: np.ndarray, views: np.ndarray) -> tuple[Tensor, Tensor]:
        """Latents fp16 (B, Z, h, w) and labels (B,), in the order on disk."""
        order = np.argsort(positions)
        positions, views = positions[order], views[order]
        return torch.from_numpy(self.latents[positions, views]), torch.from_numpy(self.targets[positions])


def training_batches(
    data: CachedSet, batch_size: int, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """All full batches of an epoch, each image in one of its views; threads read a few batches ahead."""
    order = data.usable[permutation(len(data), [seed, epoch])]
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch, VIEW_WORD])).random_raw(len(data))
    views = (words % np.uint64(data.latents.shape[1])).astype(np.int64)
    starts = range(0, len(data) - batch_size + 1, batch_size)
    yield from in_threads(
        lambda start: data.read(order[start : start + batch_size], views[start : start + batch_size]), starts
    )


def batches_in_order(data: CachedSet, batch_size: int) -> Iterator[Tensor]:
    """The first view of all images."""
    starts = range(0, len(data), batch_size)

    def read(start: int) -> Tensor:
        positions = data.usable[start : start + batch_size]
        return data.read(positions, np.zeros_like(positions))[0]

    yield from in_threads(read, starts)


def channel_statistics(data: CachedSet) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (1, Z, 1, 1) of the channels, of evenly spread images."""
    chosen = data.usable[:: max(1, len(data) // STATISTICS_IMAGES)]
    latents, _ = data.read(chosen, np.zeros_like(chosen))
    std, mean = torch.std_mean(latents.double(), dim=(0, 2, 3), keepdim=True)
    return mean.float(), std.clamp(min=1e-6).float()
