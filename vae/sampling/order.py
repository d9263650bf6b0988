"""The order of images as a function of (seed, epoch, step), so resuming needs only the position.

Of a dataset of shards, each epoch permutes the shards and cuts their samples, in this order, into V streams
of equal length. Within a stream, samples are permuted within windows. Those of all streams together have
SHUFFLE_SHARDS shards, so few streams mix as well as many, with the same memory. Sample q of an epoch is the
next one of stream q mod V. So every number of processes W gives the same batches, and the process of rank r
reads only the streams that are r modulo gcd(V, W): every W-th one if W divides V.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np


class Order(Protocol):
    """The order of the images of a set in each epoch; its length is the number of images of an epoch."""

    @property
    def num_streams(self) -> int | None:
        """The number that the number of processes should divide; None: any number is as good."""
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
    shuffle_shards: int | None = None

    def __init__(self, num_images: int, seed: int):
        self._num_images = num_images
        self._permutation = lru_cache(maxsize=1)(lambda epoch: permutation(num_images, [seed, epoch]))

    def __len__(self) -> int:
        return self._num_images

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """The images at the positions first, first + step, ... of an epoch."""
        return self._permutation(epoch)[first : first + step * count : step].tolist()

    def take(self, epoch: int, first: int, count: int, step: int) -> np.ndarray:
        """The images at the positions first, first + step, ...: int64."""
        return self._permutation(epoch)[first : first + step * count : step]

    def block_length(self, _least: int) -> int:
        """The positions of an epoch."""
        return self._num_images

    def shape(self, _epoch: int, _position: int) -> None:
        """Crops are squares."""


def by_hash(names: Iterable[bytes]) -> np.ndarray:
    """The numbers of the names in the order of their hashes, whose first n are a sample of n: int64 (N,).

    The sample represents all parts of a set, and stays when others are added.
    """
    hashes = [hashlib.blake2b(name, digest_size=8, person=b"sample").digest() for name in names]
    return np.argsort(np.frombuffer(b"".join(hashes), ">u8"), kind="stable")


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


# ---- Streams of shards -------------------------------------------------------------------------------------

SHUFFLE_SHARDS = 256  # samples are permuted within so many shards, over all streams; one of each at least
MIN_SAMPLES = 16  # in a stream: an epoch leaves out fewer than one image of 16
CACHE_BYTES = 48 * 10**9  # fit into the default --cache_gib: a whole dataset, or all streams of a machine
FEW_STREAMS = 96  # above, a dataset is read by several machines, and each has a part of the streams
MIN_SHARDS = 64  # in a stream, if there are more than FEW_STREAMS
# Many processes divide them: 48 those of 1, 2, 3 or 6 nodes of 8 cards, 96 also those of 4 and 12, 480 also
# those of 5 and 10, and 6720 those of 1 to 8, 10, 12, 14 and 15 nodes.
STREAMS = (1, 2, 4, 8, 16, 24, 48, FEW_STREAMS, 192, 480, 960, 3360, 6720)


def shards_at_once(streams: int, window_shards: int) -> int:
    """Shards that are read at once: two windows of each stream, and the rest of a shard (measured)."""
    return streams * (2 * window_shards + 1)


def default_streams(samples: int, shards: int, size: int) -> int:
    """The largest number of STREAMS for which a dataset of `size` bytes has enough samples and shards."""
    most = shards // MIN_SHARDS
    if most < FEW_STREAMS:
        fitting = (
            FEW_STREAMS if size <= CACHE_BYTES else CACHE_BYTES * shards // (shards_at_once(1, 1) * size)
        )
        most = min(FEW_STREAMS, fitting)
    return max(n for n in STREAMS if n == 1 or (n <= most and samples // n >= MIN_SAMPLES))


def fitting_shuffle(streams: int, shard_bytes: float, room: float) -> int:
    """The default of --shuffle_shards if the shards that are read at once may have `room` bytes."""
    window = int((room / (streams * shard_bytes) - 1) / 2)
    return streams * max(1, min(window, SHUFFLE_SHARDS // streams))


def count_streams(samples: int, most: int) -> int:
    """The number of streams of a dataset: `most`, halved until a stream has MIN_SAMPLES."""
    count = most
    while count > 1 and (samples // count < MIN_SAMPLES):
        count //= 2
    return count


def streams_of_process(streams: int, world_size: int) -> int:
    """The number of streams that each process reads."""
    return streams // math.gcd(streams, world_size)


class StreamOrder:
    """The sample numbers of an epoch, computed when they are needed. Keeps one window of each used stream."""

    def __init__(
        self,
        shard_samples: Sequence[int] | np.ndarray,
        num_streams: int,
        seed: int,
        shuffle_shards: int | None = None,
    ):
        """`shard_samples`: samples of each shard. `shuffle_shards`: shards of the windows of all streams."""
        self._counts = np.asarray(shard_samples, dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self.seed = seed
        self.num_streams = num_streams
        self.length = int(self._counts.sum()) // num_streams  # of a stream
        self.window_shards = max(1, (shuffle_shards or SHUFFLE_SHARDS) // num_streams)
        self.window_length = max(1, min(self.length, self.window_shards * int(self._counts.mean())))
        self._windows: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # the last one of each stream
        self._shards = lru_cache(maxsize=2)(self._shard_order)  # of this epoch and the next one

    @property
    def shuffle_shards(self) -> int:
        """Shards of the windows of all streams."""
        return self.window_shards * self.num_streams

    def __len__(self) -> int:
        """Samples of an epoch; fewer than num_streams are left out, other ones in each epoch."""
        return self.length * self.num_streams

    def samples(self, epoch: int, first: int, count: int, step: int = 1) -> list[int]:
        """Numbers, in the dataset, of the samples at the positions first, first + step, ... of an epoch."""
        return [self._sample(epoch, first + step * n) for n in range(count)]

    def shape(self, _epoch: int, _position: int) -> None:
        """Crops are squares."""

    def window(self, position: int) -> int:
        """The window of its stream in which a position of an epoch is."""
        return position // self.num_streams // self.window_length

    def shards_ahead(self, epoch: int, position: int, world_size: int) -> list[int]:
        """The shards in which every world_size-th sample from a position on is, of two windows.

        Those of the current window come first.
        """
        apart = math.gcd(self.num_streams, world_size)
        window, streams = self.window(position), range(position % apart, self.num_streams, apart)
        is_last = (window + 1) * self.window_length >= self.length
        places = [(epoch, window), (epoch + 1, 0) if is_last else (epoch, window + 1)]
        shards = [self._window_shards(*place, stream) for place in places for stream in streams]
        return list(dict.fromkeys(np.concatenate(shards).tolist()))

    def window_samples(self, epoch: int, stream: int, window: int) -> np.ndarray:
        """The samples of a window in their order, int64."""
        key, samples = self._windows.get(stream, (None, None))
        if samples is None or key != (epoch, window):
            first = window * self.window_length
            count = min(self.window_length, self.length - first)
            places = stream * self.length + first + np.arange(count)
            samples = self._at(epoch, places[permutation(count, [self.seed, epoch, 1 + stream, window])])
            self._windows[stream] = (epoch, window), samples
        return samples

    def take(self, epoch: int, first: int, count: int, step: int) -> np.ndarray:
        """The images at the positions first, first + step, ...: int64."""
        places, streams = np.divmod(first + step * np.arange(count), self.num_streams)
        samples = np.empty(count, np.int64)
        apart = self.num_streams // math.gcd(self.num_streams, step)  # samples of one stream
        for begin in range(min(apart, count)):
            own = places[begin::apart]
            windows, starts = np.unique(own // self.window_length, return_index=True)
            parts = zip(windows.tolist(), np.split(own % self.window_length, starts[1:]), strict=True)
            stream = int(streams[begin])
            samples[begin::apart] = np.concatenate(
                [self.window_samples(epoch, stream, window)[within] for window, within in parts]
            )
        return samples

    def block_length(self, least: int) -> int:
        """Positions of whole windows of all streams, at least so many."""
        positions = self.window_length * self.num_streams
        return positions * -(-least // positions)

    def _window_shards(self, epoch: int, window: int, stream: int) -> np.ndarray:
        order, ends = self._shards(epoch)
        first = stream * self.length + window * self.window_length
        last = stream * self.length + min((window + 1) * self.window_length, self.length) - 1
        begin, end = np.searchsorted(ends, (first, last), side="right")
        return order[begin : end + 1]

    def _sample(self, epoch: int, position: int) -> int:
        place, stream = divmod(position, self.num_streams)
        window, within = divmod(place, self.window_length)
        return int(self.window_samples(epoch, stream, window)[within])

    def _at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The samples at these places of the epoch's sequence of shards."""
        order, ends = self._shards(epoch)
        ranks = np.searchsorted(ends, places, side="right")
        shards = order[ranks]
        return self._firsts[shards] + places - (ends[ranks] - self._counts[shards])

    def _shard_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of an epoch in their order, and the place after the last sample of each."""
        order = permutation(len(self._counts), [self.seed, epoch, 0])
        return order, np.cumsum(self._counts[order])


EpochOrder = StreamOrder | ShuffledOrder  # the orders of all images of a set
