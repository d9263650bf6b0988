"""The shards of a dataset on a remote store or a shared disk, read from their copies in the cache."""

import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.images.formats import BadImageError
from vae.shards.dataset_json import ShardedDataset
from vae.shards.index import Row, Shard, check_bytes, max_index_bytes, read_index
from vae.shards.shard_cache import ShardCache
from vae.shards.store import StoreFile, download
from vae.system.errors import DataError, UserError
from vae.system.files import open_regular

THREADS = 4  # that fetch ahead: one connection seldom has the bandwidth of a network
TRIES = 5  # to open a shard that other processes remove


class CachedShards:
    """Shards in a cache, which are fetched whole: ahead by threads, or when an image of them is read."""

    def __init__(self, dataset: ShardedDataset, cache: ShardCache) -> None:
        self._dataset, self._cache = dataset, cache
        self._bad: dict[str, BadImageError] = {}  # by the SHA-256 of the shard or index
        self._read_again: set[str] = set()  # shards whose copy was damaged
        self._used: set[str] = set()
        self._counts = _no_counts()
        self._ahead = _ReadAhead(self._fetch_all)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedShards, (self._dataset, self._cache)

    def index(self, shard: Shard) -> np.ndarray:
        """The index of a shard: index_type (samples,). BadImageError for a bad one."""
        path = self._fetch_index(shard)
        try:
            return read_index(path, shard)
        except BadImageError:
            if path.parent != self._cache.folder:
                raise
        with suppress(OSError):  # the copy is damaged, or another process has removed it
            path.unlink()
        return read_index(self._fetch_index(shard), shard)

    def read(self, shard: Shard, row: Row) -> bytes:
        """The bytes of an image file; a damaged copy of its shard is fetched again once."""
        try:
            return check_bytes(self.read_unchecked(shard, row.offset, row.size), row)
        except BadImageError:
            if shard.sha256 in self._read_again:
                raise
        self._read_again.add(shard.sha256)
        with suppress(OSError):  # Windows: another process reads it
            self._path(shard).unlink()
        return check_bytes(self.read_unchecked(shard, row.offset, row.size), row)

    def read_unchecked(self, shard: Shard, offset: int, size: int) -> bytes:
        """Any bytes of a shard."""
        if shard.sha256 not in self._used:
            self._used.add(shard.sha256)
            self._cache.touch(self._path(shard))
        for tries in range(TRIES):
            try:
                with open_regular(self._path(shard)) as file:
                    file.seek(offset)
                    data = file.read(size)
            except FileNotFoundError:
                self._counts["misses"] += not tries
                self._fetch(shard)
                continue
            self._counts["hits"] += not tries
            self._counts["disk_bytes"] += len(data)
            return data
        raise DataError(
            f"--cache_dir {self._cache.folder}: other processes remove shards before they are read: raise "
            "--cache_gib"
        )

    def expect(self, shards: Sequence[Shard]) -> None:
        """Fetch these shards ahead, in this order; they count as used now."""
        self._ahead.want(shards)

    def counts(self) -> dict[str, int]:
        """Bytes and images read since the last call, and shards that this process expects to read."""
        counts, self._counts = self._counts, _no_counts()
        return {**counts, "open_shards": self._ahead.wanted}

    def _path(self, shard: Shard) -> Path:
        return self._cache.path(shard.name, shard.sha256)

    def _fetch_all(self, shard: Shard) -> None:
        """Fetch a shard and its index."""
        self._fetch_index(shard)
        self._fetch(shard)

    def _fetch_index(self, shard: Shard) -> Path:
        """The path of an index: of a local dataset, or of its copy."""
        file = self._dataset.index_file(shard)
        if isinstance(file, Path):
            return file
        return self._obtain(file, shard.index_sha256, max_index_bytes(shard))

    def _fetch(self, shard: Shard) -> None:
        """Fetch a shard if it is not here, and note that it is used now."""
        path = self._obtain(self._dataset.shard_file(shard), shard.sha256, shard.bytes)
        self._cache.touch(path)

    def _obtain(self, file: Path | StoreFile, sha256: str, size: int) -> Path:
        path = self._cache.path(file.name, sha256)
        if path.exists():
            return path
        if sha256 in self._bad:
            raise self._bad[sha256]
        try:
            return self._cache.obtain(file.name, sha256, size, partial(self._download, file))
        except BadImageError as error:
            self._bad[sha256] = error
            raise

    def _download(self, file: Path | StoreFile, path: Path) -> None:
        download(file, path)
        self._counts["remote_bytes"] += path.stat().st_size


class _ReadAhead:
    """Threads of a training process that fetch shards before they are needed."""

    def __init__(self, fetch: Any) -> None:
        self._fetch = fetch
        self._guard = threading.Lock()
        self._todo: deque[Shard] = deque()
        self._threads: set[threading.Thread] = set()
        self._process = os.getpid()
        self.wanted = 0

    def want(self, shards: Sequence[Shard]) -> None:
        """Fetch these shards, in this order, and no others."""
        if self._process != os.getpid():  # forked: without the threads of its parent
            self.__init__(self._fetch)  # type: ignore[misc]
        with self._guard:
            self._todo = deque(shards)
            self.wanted = len(shards)
            for _ in range(min(THREADS, len(shards)) - len(self._threads)):
                thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
                self._threads.add(thread)
                thread.start()

    def join(self) -> None:
        """Wait until nothing is left to fetch."""
        for thread in list(self._threads):
            thread.join()

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._todo:
                    self._threads.discard(threading.current_thread())
                    return
                shard = self._todo.popleft()
            with suppress(BadImageError, UserError, OSError):  # the process that reads the shard reports it
                self._fetch(shard)


def _no_counts() -> Counter[str]:
    return Counter(remote_bytes=0, disk_bytes=0, hits=0, misses=0)
