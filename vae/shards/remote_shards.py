"""The shards of a dataset on a remote store or a shared disk: whole ones in the cache, or single images."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.images.formats import BadImageError
from vae.shards.dataset_json import ShardedDataset
from vae.shards.index import Row, Shard, check_bytes, max_index_bytes, parse_index, read_index
from vae.shards.read_ahead import ReadAhead
from vae.shards.shard_cache import POLL_SECONDS, Entry, ShardCache, remove_if_bad
from vae.shards.shard_images import ShardImages
from vae.shards.store import StoreFile, TooLargeError, download, read_file, read_range
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import open_regular

ROOM_SECONDS = 300.0  # until other processes need their shards no more
# Images of a shard that is not there, which each process reads one by one: a gigabyte may take minutes.
FIRST_READS, FIRST_PART = 32, 50  # so many, or one of so many
REMOVED_TRIES = 3  # another machine may remove a shard before it is opened


class RemoteShards:
    """Shards in a cache. A copy in another process fetches those that it needs and that are not there."""

    def __init__(self, dataset: ShardedDataset, cache: ShardCache, *, whole: bool = True) -> None:
        """`whole`: fetch whole shards; otherwise use those of the cache, and read single images."""
        self._dataset, self._cache, self._whole = dataset, cache, whole
        self._store = dataset.store or StoreFile(
            f"file://{dataset.folder.absolute().as_posix()}/", dataset.flag
        )
        self._gives_ranges = True
        self._counts = _no_counts()
        self._bad_indexes: dict[str, BadImageError] = {}  # by the SHA-256 of the shard
        self._checked: set[str] = set()  # shards whose copy in the cache was verified again
        self._first_reads: Counter[str] = Counter()  # by the SHA-256 of the shard
        self._begin()

    def _begin(self) -> None:
        self._ahead = ReadAhead(self._cache, self._fetch)
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self._dataset, "cache": self._cache, "whole": self._whole}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def index(self, shard: Shard) -> np.ndarray:
        """The index of a shard, which is fetched again once if it is bad."""
        if isinstance(path := self._dataset.index_file(shard), Path):
            return read_index(path, shard)
        self._cache.touch(_entry(shard))
        try:
            return read_index(self._cache.index_path(self._index_entry(shard)), shard)
        except BadImageError:
            pass
        if shard.sha256 in self._bad_indexes:
            raise self._bad_indexes[shard.sha256]
        try:
            return self.fetch_index(shard)
        except BadImageError:
            pass
        try:
            return self.fetch_index(shard)
        except BadImageError as error:
            self._bad_indexes[shard.sha256] = error
            raise

    def fetch_index(self, shard: Shard) -> np.ndarray:
        """The index of a shard from the store; BadImageError if it does not describe this shard."""
        file = self._dataset.index_file(shard)
        if isinstance(file, Path):
            return read_index(file, shard)
        try:
            data = read_file(file, max_bytes=max_index_bytes(shard))
        except TooLargeError:
            raise BadImageError("bad_index", f"{file.name} is larger than an index of {shard.name}") from None
        self._counts["remote_bytes"] += len(data)
        rows = parse_index(data, shard)
        self._cache.store_index(self._index_entry(shard), data)
        return rows

    def _index_entry(self, shard: Shard) -> Entry:
        """What the cache has the index as: several datasets may share the tar files that others wrote."""
        own = None if self._dataset.tars is None else shard.index_sha256
        return _entry(shard._replace(sha256=own or shard.sha256))

    @contextmanager
    def fetched_anew(self, shard: Shard) -> Iterator[Path]:
        """The path of a shard, downloaded now even if the cache has it, and kept within this context.

        BadImageError if the store's bytes are not those of dataset.json, UserError if there is no room.
        """
        entry = _entry(shard)
        self._cache.retry_bad([shard])
        self._cache.remove_if_free(entry)
        self._cache.pin(entry)
        try:
            until = time.monotonic() + ROOM_SECONDS
            while (path := self._fetch(entry, anew=True)) is None:
                if time.monotonic() > until:
                    raise no_room(self._cache, shard)
                time.sleep(POLL_SECONDS)
                self._cache.look_again()
            yield path
        finally:
            self._cache.unpin(entry)

    def read(self, shard: Shard, row: Row) -> bytes:
        """The bytes of an image file, which are read again once if they are bad."""
        try:
            return check_bytes(self.read_unchecked(shard, row.offset, row.size), row)
        except BadImageError:
            path = self._cache.find(_entry(shard))
            if shard.sha256 in self._checked or (path and not remove_if_bad(path, shard.sha256)):
                raise
            self._checked.add(shard.sha256)
        return check_bytes(self.read_unchecked(shard, row.offset, row.size), row)

    def read_unchecked(self, shard: Shard, offset: int, size: int) -> bytes:
        """Any bytes of a shard: the first ones over the network, while threads fetch it."""
        path = self._cache.find(_entry(shard))
        entry = _entry(shard)
        self._counts["misses" if path is None else "hits"] += 1
        first = max(FIRST_READS, shard.samples // FIRST_PART)
        if path is None and self._whole and self._first_reads[shard.sha256] < first:
            self._first_reads[shard.sha256] += 1
            if self._process != os.getpid():  # forked: without the threads of its parent
                self._begin()
            self._ahead.fetch(entry)
            if (data := self._read_range(shard, offset, size)) is not None:
                return data
        for _ in range(REMOVED_TRIES):
            path = path or (self._fetch(entry) if self._whole else None)
            if path is None:
                break
            try:
                with open_regular(path) as file:
                    file.seek(offset)
                    data = file.read(size)
            except OSError:
                path = None
                continue
            self._counts["disk_bytes"] += len(data)
            return data
        if (data := self._read_range(shard, offset, size)) is not None:
            return data
        path = self._fetch(entry)
        if path is None:
            raise DataError(
                f"{self._store.flag} {self._store}: the store gives only whole files, and {shard.name} "
                f"({shard.bytes / 1e6:.0f} MB) does not fit into the cache: raise --cache_gib, or give a "
                "--cache_dir on another disk"
            )
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(size)

    def _read_range(self, shard: Shard, offset: int, size: int) -> bytes | None:
        """Some bytes of a shard, from the store; None if it gives only whole files."""
        if not self._gives_ranges:
            return None
        try:
            with self._cache.one_reporter() as warn:
                data = read_range(self._store.sibling(shard.name), offset, size, warn=warn)
        except TooLargeError:
            self._gives_ranges = False
            return None
        self._counts["remote_bytes"] += len(data)
        return data

    def _fetch(self, entry: Entry, *, anew: bool = False) -> Path | None:
        with self._cache.one_reporter() as warn:
            return self._cache.obtain(entry, partial(self._download, entry, warn), anew=anew)

    def _download(self, entry: Entry, warn: Callable[[str], None], path: Path) -> None:
        download(self._store.sibling(entry.name), path, max_bytes=entry.bytes, warn=warn)
        self._counts["remote_bytes"] += path.stat().st_size

    def expect(self, shards: Sequence[Shard]) -> None:
        """Fetch these shards ahead, in this order, and keep them until the next call."""
        self._ahead.want([_entry(shard) for shard in shards])

    def scattered(self) -> "RemoteShards":
        """The same files, for reading a few images of many shards."""
        return RemoteShards(self._dataset, self._cache, whole=False)

    def counts(self) -> dict[str, int]:
        """Bytes and images read, and shards that this process keeps."""
        counts, self._counts = self._counts, _no_counts()
        return {**counts, "open_shards": len(self._ahead)}


def open_images(dataset: ShardedDataset, num_streams: int | None, cache: ShardCache | None) -> ShardImages:
    """The images of a dataset; a remote one needs a cache, and a local one is read in place without it."""
    if not dataset.shards.hashed_indexes:
        console.info(
            f"{dataset.path} was written by an older version, without checksums of the indexes: damage of an "
            "index is not noticed. To have them, write it anew: prepare_data.py --mode shard"
        )
    if dataset.store is None and not (cache and cache.keeps_local):
        return ShardImages(dataset, num_streams)
    assert cache is not None, "its shards are remote"
    if line := cache.retry_bad(dataset.shards):
        console.info(line)
    return ShardImages(dataset, num_streams, RemoteShards(dataset, cache))


def no_room(cache: ShardCache, shard: Shard) -> UserError:
    """The error of a shard that does not fit into the cache."""
    return UserError(
        f"--cache_dir {cache.folder} has no room for {shard.name} ({shard.bytes / 1e6:.0f} MB): raise "
        "--cache_gib, free some space, or give a --cache_dir on another disk"
    )


def _no_counts() -> Counter[str]:
    return Counter(remote_bytes=0, disk_bytes=0, hits=0, misses=0)


def _entry(shard: Shard) -> Entry:
    return Entry(shard.name, shard.bytes, shard.sha256)
