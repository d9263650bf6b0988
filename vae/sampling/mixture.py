"""The order of a mixture of sharded datasets with weights, as a function of (seed, epoch, step).

In each of its streams, every block of BLOCK samples has the same number of each dataset, in an order of its
own. So the number of samples of a dataset before any position is known without counting, and each dataset
goes through its own epochs. All datasets have the same number of streams: a process reads its own ones only.
"""

from collections.abc import Sequence

import numpy as np

from vae.sampling.order import permutation
from vae.sampling.streams import StreamOrder

BLOCK = 1000  # samples: weights are rounded to shares of this


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Samples of each dataset in a block: int64 (D,), at least 1 each, and BLOCK together."""
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts = np.maximum(1, np.floor(exact).astype(np.int64))
    for number in np.argsort(counts - exact, kind="stable")[: max(0, BLOCK - counts.sum())]:
        counts[number] += 1
    counts[counts.argmax()] += BLOCK - counts.sum()
    return counts


class MixtureOrder:
    """Samples of several orders; an epoch has as many as all of them together."""

    def __init__(self, orders: Sequence[StreamOrder], weights: Sequence[float], seed: int):
        """`orders`: with the same number of streams."""
        assert len({order.num_streams for order in orders}) == 1
        self.orders, self.num_streams = list(orders), orders[0].num_streams
        self._weights, self.seed = weights, seed
        self.firsts = np.cumsum([0, *(order.num_images for order in orders)])  # of the images of each
        self.length = sum(order.length for order in orders)  # of a stream
        self._counts = block_counts(weights)
        # As StreamOrder.window_length: a dataset has at most about one window of its own in it.
        windows = np.array([order.window_length for order in orders]) * BLOCK // self._counts
        self.window_length = max(1, min(self.length, int(windows.min())))
        self._blocks: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}  # the last one of each stream

    def mixing(self, shuffle_shards: int | None) -> "MixtureOrder":
        """The order with windows of so many shards of each dataset; None: the default."""
        return MixtureOrder([order.mixing(shuffle_shards) for order in self.orders], self._weights, self.seed)

    @property
    def shuffle_shards(self) -> int:
        """Shards of the windows of all streams, of each dataset."""
        return self.orders[0].shuffle_shards

    @property
    def num_images(self) -> int:
        """Samples of all datasets."""
        return int(self.firsts[-1])

    def __len__(self) -> int:
        return self.length * self.num_streams

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        found = []
        for position in range(first, first + step * count, step):
            number, its_epoch, its_position = self.place(epoch, position)
            (sample,) = self.orders[number].samples(its_epoch, its_position, 1)
            found.append(int(self.firsts[number]) + sample)
        return found

    def shape(self, _epoch: int, _position: int) -> None:
        """Crops are squares."""

    def place(self, epoch: int, position: int) -> tuple[int, int, int]:
        """The dataset of a position, and the epoch and position of its own order there."""
        place, stream = divmod(position, self.num_streams)
        block, within = divmod(epoch * self.length + place, BLOCK)
        numbers, ranks = self._block(stream, block)
        number = int(numbers[within])
        done = block * int(self._counts[number]) + int(ranks[within])  # of the dataset, in this stream
        its_epoch, its_place = divmod(done, self.orders[number].length)
        return number, its_epoch, its_place * self.num_streams + stream

    def next_places(self, epoch: int, position: int) -> list[tuple[int, int]]:
        """For each dataset the epoch and position of its own order from which it is read next."""
        place, stream = divmod(position, self.num_streams)
        block, within = divmod(epoch * self.length + place, BLOCK)
        numbers, _ = self._block(stream, block)
        places = []
        for number, order in enumerate(self.orders):
            done = block * int(self._counts[number]) + int((numbers[:within] == number).sum())
            its_epoch, its_place = divmod(done, order.length)
            places.append((its_epoch, its_place * self.num_streams + stream))
        return places

    def window_samples(self, epoch: int, stream: int, window: int) -> np.ndarray:
        """The samples of a window of a stream in their order, int64."""
        first = window * self.window_length
        places = epoch * self.length + first + np.arange(min(self.window_length, self.length - first))
        blocks = range(int(places[0]) // BLOCK, int(places[-1]) // BLOCK + 1)
        numbers = np.concatenate([self._block(stream, block)[0] for block in blocks])
        numbers = numbers[places - blocks[0] * BLOCK]
        samples = np.empty(len(places), np.int64)
        starts = self.next_places(epoch, first * self.num_streams + stream)
        for number, (order, (its_epoch, its_position)) in enumerate(zip(self.orders, starts, strict=True)):
            own = np.flatnonzero(numbers == number)
            place = its_epoch * order.length + its_position // self.num_streams
            samples[own] = self.firsts[number] + order.run(stream, place, len(own))
        return samples

    def _block(self, stream: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The dataset of each sample of a block, and how many of it the block has before."""
        found = self._blocks.get(stream)
        if found is None or found[0] != block:
            shuffled = permutation(BLOCK, [self.seed, len(self.orders), stream, block])
            numbers = np.repeat(np.arange(len(self.orders)), self._counts)[shuffled]
            ranks = np.empty(BLOCK, np.int64)
            order = np.argsort(numbers, kind="stable")
            ranks[order] = np.concatenate([np.arange(count) for count in self._counts])
            found = self._blocks[stream] = block, numbers, ranks
        return found[1], found[2]
