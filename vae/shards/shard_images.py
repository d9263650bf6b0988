"""The images of a dataset of shards, read by number, from a folder or from elsewhere."""

import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from vae.images.decoding import decode_bytes
from vae.images.formats import BadImageError
from vae.sampling.order import Order
from vae.sampling.streams import StreamOrder, count_streams, default_streams
from vae.shards.cached_shards import CachedShards
from vae.shards.dataset_json import ShardedDataset
from vae.shards.index import Row, row_name
from vae.shards.local_shards import OPEN_SHARDS, LocalShards
from vae.shards.members import metadata_of, split_last, split_name, texts_in
from vae.shards.shard_cache import ShardCache

INDEX_BYTES = 256 * 2**20  # of indexes that one process keeps; reading one again takes milliseconds
TEXT_BYTES = 2**20  # at most, of the texts before and after an image, with their headers


def streams_of(datasets: Sequence[ShardedDataset]) -> int:
    """The default of --data_streams for one dataset, or several that count as one."""
    totals = [(one.samples, len(one.shards), int(one.shards.bytes.sum())) for one in datasets]
    return default_streams(*map(sum, zip(*totals, strict=True)))


class ShardImages:
    """The image files of a dataset by their index, checked by their crc32. Keeps INDEX_BYTES of indexes."""

    def __init__(self, dataset: ShardedDataset, num_streams: int | None, cache: ShardCache | None = None):
        """`num_streams`: of the order of training, at most.

        A remote dataset needs a cache; a local one is read in place, unless the cache is for local ones too.
        """
        self.dataset = dataset
        self.num_streams = num_streams or streams_of([dataset])
        is_cached = cache is not None and (cache.keeps_local or dataset.store is not None)
        self.cache = cache if is_cached else None
        self._files = (
            CachedShards(dataset, self.cache)
            if self.cache
            else LocalShards(dataset.folder, dataset.index_folder)
        )
        self._begin()

    def _begin(self) -> None:
        self._rows: OrderedDict[int, np.ndarray] = OrderedDict()
        self._expected: tuple[int, int] | None = None

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.dataset.shards.samples)

    @property
    def firsts(self) -> np.ndarray:
        """The number of the first image of each shard."""
        return self._ends - self.dataset.shards.samples

    def __getstate__(self) -> dict[str, Any]:
        kept = ("dataset", "num_streams", "cache", "_files")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def location(self) -> str:
        """The path of `dataset.json`."""
        return str(self.dataset.path)

    def order(self, seed: int) -> Order:
        """Every sample in each epoch, except fewer than `num_streams`."""
        counts = self.dataset.shards.samples
        return StreamOrder(counts, count_streams(len(self), self.num_streams), seed)

    def fingerprint(self) -> str:
        """The version of the dataset and the number of streams."""
        return f"{self.dataset.version} {self.num_streams}"

    def record(self) -> dict[str, Any]:
        """Path, version and size of the dataset."""
        return {"dataset": self.location, "version": self.dataset.version, "samples": len(self)}

    def decode(self, index: int, *, max_pixels: int, background: str) -> np.ndarray:
        """The pixels of an image: uint8 (H, W, 3)."""
        first_frame = bool(self.dataset.policy.get("first_frame"))
        return decode_bytes(
            self.read(index),
            max_pixels=max_pixels,
            background=background,
            first_frame=first_frame,
            is_verified=True,
        )

    def locate(self, index: int) -> tuple[int, int]:
        """The shard of a sample, and its row there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number] - self.dataset.shards.samples[number])

    def name(self, index: int) -> str:
        """A name for messages: shard and key or member, or shard and row if the index cannot be read."""
        number, row = self.locate(index)
        shard = self.dataset.shards[number].name
        try:
            return f"{shard}/{row_name(self._index(number)[row])}"
        except BadImageError:
            return f"{shard}, sample {row}"

    def key(self, index: int) -> str:
        """The key of a sample: equal image files have equal keys. BadImageError if the shard is unusable."""
        number, row = self.locate(index)
        return self._index(number)["key"][row].decode("ascii", "replace")

    def indexes(self) -> Iterator[np.ndarray]:
        """The index of each shard: index_type (samples,). BadImageError for a bad one."""
        return map(self.rows, range(len(self.dataset.shards)))

    def rows(self, number: int) -> np.ndarray:
        """The index of a shard, which is not kept. BadImageError for a bad one."""
        return self._files.index(self.dataset.shards[number])

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Width and height of images: int64 (n, 2); 0 for those of a bad index, which reading names."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        sizes = np.zeros((len(indices), 2), np.int64)
        order = np.argsort(numbers, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            with suppress(BadImageError, IndexError):  # no images at all
                number = int(numbers[places[0]])
                first = self._ends[number] - self.dataset.shards.samples[number]
                rows = self._index(number)[indices[places] - first]
                sizes[places] = np.stack([rows["width"], rows["height"]], axis=1)
        return sizes

    def spread(self, least: int) -> np.ndarray:
        """The images of some shards, spread over the dataset, at least so many; or all images."""
        samples = self.dataset.shards.samples
        count = min(len(samples), -(-least * len(samples) // len(self)))
        numbers = np.arange(count) * len(samples) // count
        return np.concatenate([np.arange(self._ends[n] - samples[n], self._ends[n]) for n in numbers])

    def read(self, index: int) -> bytes:
        """The bytes of an image file. BadImageError if they cannot be read or differ from those written."""
        number, row = self.locate(index)
        return self._files.read(self.dataset.shards[number], self._row(number, row))

    def metadata(self, index: int) -> dict[str, Any]:
        """What the texts beside an image say: json, txt as `caption`, cls as `label`; its name as `source`.

        BadImageError if they cannot be read.
        """
        number, row = self.locate(index)
        shard = self.dataset.shards[number]
        rows = self._index(number)
        place = self._row(number, row)
        end = place.offset + -(-place.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE  # of the image
        first, last = (rows[column][row].item() for column in ("text_start", "text_end"))
        name = row_name(rows[row])
        keys = {(split_name(name) or ("", ""))[0], split_last(name)[0]}
        texts = dict[str, bytes]()
        for start, stop in ((first, min(last, place.offset)), (max(first, end), last)):
            if start < stop:
                part = self._files.read_unchecked(shard, start, min(stop - start, TEXT_BYTES))
                texts |= texts_in(part, *keys)
        return {"source": name, **metadata_of(texts)}

    def _row(self, number: int, row: int) -> Row:
        return Row(*self._index(number)[row].item()[: len(Row._fields)])

    def _index(self, number: int) -> np.ndarray:
        """The index of a shard. Threads may read one twice, but never a part of one."""
        rows = self._rows.get(number)
        if rows is None:
            rows = self._rows[number] = self._files.index(self.dataset.shards[number])
            if len(self._rows) > max(OPEN_SHARDS, INDEX_BYTES // rows.nbytes):
                with suppress(KeyError):  # another thread has emptied it
                    self._rows.popitem(last=False)
        return rows

    def expect(self, order: Order, epoch: int, position: int, world_size: int) -> None:
        """Training continues with every world_size-th image from this position on: shards are fetched."""
        assert isinstance(order, StreamOrder)
        window = epoch, order.window(position)
        if window != self._expected:
            self._expected = window
            self.fetch(order.shards_ahead(epoch, position, world_size))

    def fetch(self, numbers: Sequence[int]) -> None:
        """Fetch these shards ahead, in this order, and keep them until the next call."""
        self._files.expect([self.dataset.shards[number] for number in numbers])

    def counts(self) -> dict[str, int]:
        """What this process has read since the last call (vae.data.dataset)."""
        return self._files.counts()
