"""The images of a dataset of shards, read by number, from a folder or from elsewhere."""

import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vae.images.decoding import decode_bytes
from vae.images.formats import BadImageError
from vae.progress import track
from vae.sampling.order import Order, StreamOrder, by_hash, count_streams, default_streams, fitting_shuffle
from vae.shards.dataset_json import (
    Row,
    Shard,
    ShardedDataset,
    check_bytes,
    index_path,
    read_index,
    read_part,
    row_name,
)
from vae.shards.shard_cache import CachedShards, ShardCache

# ---- Shards in a folder ------------------------------------------------------------------------------------


class LocalShards:
    """Shards in a folder."""

    def __init__(self, folder: Path, indexes: Path) -> None:
        self._folder, self._indexes = folder, indexes
        self._counts: Counter[str] = Counter()

    def index(self, shard: Shard) -> np.ndarray:
        """The index of a shard: index_type (samples,)."""
        return read_index(index_path(self._indexes, shard.name), shard)

    def read(self, shard: Shard, row: Row) -> bytes:
        """The bytes of an image file."""
        return check_bytes(self.read_unchecked(shard, row.offset, row.size), row)

    def read_unchecked(self, shard: Shard, offset: int, size: int) -> bytes:
        """Any bytes of a shard."""
        try:
            data = read_part(self._folder / shard.name, offset, size)
        except FileNotFoundError as error:
            raise BadImageError("missing_shard", f"{shard.name}: {error.strerror}") from error
        except OSError as error:
            raise BadImageError("unreadable", error.strerror or str(error)) from error
        self._counts["disk_bytes"] += len(data)
        return data

    def expect(self, _shards: Sequence[Shard]) -> None:
        """Nothing to do."""

    def counts(self) -> dict[str, int]:
        """Bytes read since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)


# ---- Members of tar files ----------------------------------------------------------------------------------

TEXTS = ("json", "txt", "cls")  # extensions of members that describe an image
# As in webdataset's base_plus_ext: the extension is what follows the first point behind the last slash.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
# A damaged tar file can make tarfile raise any of these.
TAR_ERRORS = (tarfile.TarError, ValueError, ArithmeticError, IndexError)


def split_name(name: str) -> tuple[str, str] | None:
    """Key, with its folders, and extension of a member; None if it is no part of a sample."""
    name = posixpath.normpath(name)  # ./a.jpg
    match = _NAME.fullmatch(name)
    if match is None or name.startswith(("/", "../", "__")):  # __x__ is WebDataset's own
        return None
    return match[1], match[2].lower()


def split_last(name: str) -> tuple[str, str]:
    """Key and extension of a member as file names have them: the extension follows the last point."""
    stem, extension = posixpath.splitext(posixpath.normpath(name))
    return stem, extension[1:].lower()


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member is a file whose bytes follow each other in the tar file."""
    return member.isreg() and not member.issparse()


def texts_in(part: bytes, *keys: str) -> dict[str, bytes]:
    """The TEXTS of the sample with one of these keys, in a part of a tar file that begins with a header.

    Ends at another sample, and where the part is cut.
    """
    texts: dict[str, bytes] = {}
    with suppress(*TAR_ERRORS), tarfile.open(fileobj=io.BytesIO(part), mode="r:") as tar:
        for member in tar:
            names = [split_name(member.name) or ("", ""), split_last(member.name)]
            if not any(key in keys for key, _ in names):
                break
            data = part[member.offset_data : member.offset_data + member.size]
            extension = next((end for key, end in names if key in keys and end in TEXTS), None)
            if extension and is_plain(member) and len(data) == member.size:
                texts.setdefault(extension, data)
    return texts


def metadata_of(texts: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of a JSON text, with the other texts as `caption` and `label` if it lacks these."""
    content: Any = {}
    with suppress(ValueError):
        content = json.loads(texts.get("json", b"{}").decode("utf-8"))
    if not isinstance(content, dict):
        content = {}
    for name, extension in (("caption", "txt"), ("label", "cls")):
        if extension in texts and content.get(name) is None:
            content[name] = texts[extension].decode("utf-8", "replace").strip()
    return content


# ---- Images by their number --------------------------------------------------------------------------------

INDEX_BYTES = 256 * 2**20  # memory for indexes in each process; reading one again takes milliseconds
MIN_INDEXES = 64
TEXT_BYTES = 2**20  # maximum that is read before and after an image, with the headers of the texts


def streams_of(datasets: Sequence[ShardedDataset]) -> int:
    """The default of --data_streams."""
    totals = [(part.samples, len(part.shards), int(part.shards.bytes.sum())) for part in datasets]
    return default_streams(*map(sum, zip(*totals, strict=True)))


class ShardImages:
    """The image files of one or several datasets by their index, checked by their crc32.

    Several datasets count as one dataset with the shards of all. Keeps INDEX_BYTES of indexes.
    """

    has_index = True

    def __init__(
        self, datasets: Sequence[ShardedDataset], num_streams: int | None, cache: ShardCache | None = None
    ):
        """`num_streams`: the maximum number of streams in the order of training.

        A remote dataset needs a cache; a local one is read in place, unless the cache is for local ones too.
        """
        self.datasets = list(datasets)
        self.num_streams = num_streams or streams_of(datasets)
        self.cache = cache
        self._files = [_open_files(dataset, cache) for dataset in datasets]
        self._rows: OrderedDict[int, np.ndarray] = OrderedDict()
        self._expected: tuple[int, int] | None = None

    @cached_property
    def _samples(self) -> np.ndarray:
        """The number of images of each shard."""
        return np.concatenate([dataset.shards.samples for dataset in self.datasets])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._samples)

    @cached_property
    def _first_shards(self) -> np.ndarray:
        """The number of the first shard of each dataset."""
        return np.cumsum([0, *(len(dataset.shards) for dataset in self.datasets)])

    @property
    def num_shards(self) -> int:
        """Shards of all datasets."""
        return len(self._samples)

    @cached_property
    def firsts(self) -> np.ndarray:
        """The index of the first image of each shard."""
        return self._ends - self._samples

    @property
    def cached_bytes(self) -> np.ndarray:
        """The sizes of the shards that are read from the cache."""
        pairs = zip(self.datasets, self._files, strict=True)
        sizes = [dataset.shards.bytes for dataset, files in pairs if isinstance(files, CachedShards)]
        return np.concatenate([np.empty(0, np.int64), *sizes])

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardImages, (self.datasets, self.num_streams, self.cache)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def location(self) -> str:
        """The path of `dataset.json`, or the paths."""
        return " ".join(str(dataset.path) for dataset in self.datasets)

    @property
    def version(self) -> str:
        """The version of the dataset, or a hash of the versions."""
        versions = [dataset.version for dataset in self.datasets]
        return versions[0] if len(versions) == 1 else hashlib.sha256(" ".join(versions).encode()).hexdigest()

    def shard(self, number: int) -> tuple[ShardedDataset, Shard]:
        """A shard and its dataset."""
        part, shard = self._shard(number)
        return self.datasets[part], shard

    def order(self, seed: int, shuffle_shards: int | None = None) -> StreamOrder:
        """Every sample in each epoch, except fewer than `num_streams`.

        The default of `shuffle_shards` fits into the cache of one machine with all streams.
        """
        streams = count_streams(len(self), self.num_streams)
        sizes = self.cached_bytes
        if shuffle_shards is None and self.cache is not None and sizes.sum() > self.cache.max_bytes:
            shuffle_shards = fitting_shuffle(streams, float(sizes.mean()), self.cache.max_bytes)
        return StreamOrder(self._samples, streams, seed, shuffle_shards)

    def record(self) -> dict[str, Any]:
        """Path, version and size of the dataset."""
        return {"dataset": self.location, "version": self.version, "samples": len(self)}

    def decode(self, index: int, *, max_pixels: int, background: str, channels: int = 3) -> np.ndarray:
        """The pixels of an image: uint8 (H, W, channels)."""
        dataset, _ = self.shard(self.locate(index)[0])
        first_frame = bool(dataset.policy.get("first_frame"))
        return decode_bytes(
            self.read(index),
            max_pixels=max_pixels,
            background=background,
            first_frame=first_frame,
            is_verified=True,
            channels=channels,
        )

    def locate(self, index: int) -> tuple[int, int]:
        """The shard of a sample, and its row there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self.firsts[number])

    def name(self, index: int) -> str:
        """A name for messages: shard and key or member, or shard and row if the index cannot be read."""
        number, row = self.locate(index)
        dataset, shard = self.shard(number)
        name = shard.name if len(self.datasets) == 1 else f"{dataset.path}: {shard.name}"
        try:
            return f"{name}/{row_name(self._index(number)[row])}"
        except BadImageError:
            return f"{name}, sample {row}"

    def key(self, index: int) -> str:
        """The key of a sample: equal image files have equal keys. BadImageError if the shard is unusable."""
        number, row = self.locate(index)
        return self._index(number)["key"][row].decode("ascii", "replace")

    def label(self, index: int) -> str | None:
        """The label in the texts beside an image; None also if they cannot be read."""
        with suppress(BadImageError):  # decoding the image names it
            label = self.metadata(index).get("label")
            return None if label is None else str(label)
        return None

    def find(self, names: Set[str], keys: np.ndarray, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The indices of images with one of these names or keys (S32, sorted), in this process's shards.

        For names such as 00000.tar/cat.jpg, only the indexes of their shards are read.
        """
        tars = {name.rpartition(".tar/")[0] + ".tar" for name in names}
        indices = [np.empty(0, np.int64)]
        searched = range(rank, self.num_shards, world_size)
        for number in track(searched, "searching --exclude", len(searched), "shard", keep=False):
            dataset, shard = self.shard(number)
            prefixes = {shard.name, f"{dataset.path}: {shard.name}"} & tars  # messages have the second
            if not (len(keys) or prefixes):
                continue
            with suppress(BadImageError):  # training names the images of a bad index
                rows = self.rows(number)
                own = rows["key"]
                is_found = np.searchsorted(keys, own, "right") > np.searchsorted(keys, own, "left")
                for prefix in prefixes:
                    is_found |= np.array([f"{prefix}/{row_name(row)}" in names for row in rows])
                indices.append(self.firsts[number] + np.flatnonzero(is_found))
        return np.concatenate(indices)

    def file_sizes(self) -> np.ndarray:
        """The size of each image file in bytes. BadImageError for a bad index."""
        return np.concatenate([self.rows(number)["size"] for number in range(self.num_shards)])

    def keys(self, indices: np.ndarray) -> np.ndarray:
        """The keys of images: S32. BadImageError for a bad index."""
        return np.concatenate([self.rows(number)["key"] for number in range(self.num_shards)])[indices]

    def paths(self) -> Iterator[tuple[str, str]]:
        """Images in shards are no files of their own."""
        return iter(())

    def rows(self, number: int) -> np.ndarray:
        """The index of a shard, which is not kept. BadImageError for a bad one."""
        part, shard = self._shard(number)
        return self._files[part].index(shard)

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Width and height of images: int64 (n, 2); 0 for those of a bad index, which reading names."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        sizes = np.zeros((len(indices), 2), np.int64)
        order = np.argsort(numbers, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            with suppress(BadImageError, IndexError):  # IndexError: there are no images at all
                number = int(numbers[own[0]])
                rows = self._index(number)[indices[own] - self.firsts[number]]
                sizes[own] = np.stack([rows["width"], rows["height"]], axis=1)
        return sizes

    def sample(self, count: int) -> np.ndarray:
        """The numbers of at most `count` images of all datasets, in order.

        Each dataset contributes its share. The images are in as few shards as possible, which the hashes of
        their names choose.
        """
        if count >= len(self):
            return np.arange(len(self))
        ends = self._ends[self._first_shards[1:] - 1]  # of the images of each dataset
        shares = np.diff(count * ends // len(self), prepend=0)
        chosen = []
        for dataset, first, share in zip(self.datasets, self._first_shards[:-1], shares, strict=True):
            numbers = first + by_hash(dataset.shards.names)
            enough = np.searchsorted(np.cumsum(self._samples[numbers]), share) + 1
            of_shards = [np.arange(self.firsts[n], self._ends[n]) for n in np.sort(numbers[:enough])]
            images = np.concatenate(of_shards)
            chosen.append(images[np.arange(share) * len(images) // max(1, share)])
        return np.concatenate(chosen)

    def read(self, index: int) -> bytes:
        """The bytes of an image file. BadImageError if they cannot be read or differ from those written."""
        number, row = self.locate(index)
        part, shard = self._shard(number)
        return self._files[part].read(shard, self._row(number, row))

    def metadata(self, index: int) -> dict[str, Any]:
        """The metadata beside an image: its json, txt as `caption`, cls as `label`, its name as `source`.

        BadImageError if they cannot be read.
        """
        number, row = self.locate(index)
        part, shard = self._shard(number)
        rows = self._index(number)
        image = self._row(number, row)
        end = image.offset + -(-image.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        first, last = (rows[column][row].item() for column in ("text_start", "text_end"))
        name = row_name(rows[row])
        keys = {(split_name(name) or ("", ""))[0], split_last(name)[0]}
        texts = dict[str, bytes]()
        for start, stop in ((first, min(last, image.offset)), (max(first, end), last)):
            if start < stop:
                text = self._files[part].read_unchecked(shard, start, min(stop - start, TEXT_BYTES))
                texts |= texts_in(text, *keys)
        return {"source": name, **metadata_of(texts)}

    def _row(self, number: int, row: int) -> Row:
        return Row(*self._index(number)[row].item()[: len(Row._fields)])

    def _index(self, number: int) -> np.ndarray:
        """The index of a shard; of the others, those used last stay.

        Threads may read one twice, but never a part of one.
        """
        rows = self._rows.pop(number, None)
        rows = self._rows[number] = self.rows(number) if rows is None else rows
        if len(self._rows) > max(MIN_INDEXES, INDEX_BYTES // rows.nbytes):
            with suppress(KeyError):  # another thread has emptied it
                self._rows.popitem(last=False)
        return rows

    def expect(self, order: Order, epoch: int, position: int, world_size: int) -> None:
        """Training continues with every world_size-th image from this position on: shards are fetched."""
        assert isinstance(order, StreamOrder)
        window = epoch, order.window(position)
        if window != self._expected:
            self._expected = window
            wanted: list[list[Shard]] = [[] for _ in self._files]
            for number in order.shards_ahead(epoch, position, world_size):
                part, shard = self._shard(number)
                wanted[part].append(shard)
            for files, shards in zip(self._files, wanted, strict=True):
                files.expect(shards)

    def counts(self) -> dict[str, int]:
        """The bytes and images that this process has read since the last call."""
        total: Counter[str] = Counter()
        for files in self._files:
            total.update(files.counts())
        return dict(total)

    def _shard(self, number: int) -> tuple[int, Shard]:
        """The number of the dataset of a shard, and the shard."""
        part = int(np.searchsorted(self._first_shards, number, side="right")) - 1
        return part, self.datasets[part].shards[number - int(self._first_shards[part])]


def _open_files(dataset: ShardedDataset, cache: ShardCache | None) -> LocalShards | CachedShards:
    if cache is not None and cache.keeps(dataset):
        return CachedShards(dataset, cache)
    return LocalShards(dataset.folder, dataset.index_folder)
