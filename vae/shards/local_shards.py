"""The shards of a dataset in a folder of this machine."""

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vae.images.formats import BadImageError
from vae.shards.index import Row, Shard, check_bytes, index_path, read_index
from vae.system.files import open_regular

OPEN_SHARDS = 64  # files that one process keeps open; opening one again takes microseconds


class LocalShards:
    """Shards in a folder. Keeps the last OPEN_SHARDS open."""

    def __init__(self, folder: Path, indexes: Path) -> None:
        self._folder, self._indexes = folder, indexes
        self._begin()

    def _begin(self) -> None:
        self._open: OrderedDict[str, _TarFile] = OrderedDict()
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_indexes": self._indexes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def index(self, shard: Shard) -> np.ndarray:
        """The index of a shard: index_type (samples,)."""
        return read_index(index_path(self._indexes, shard.name), shard)

    def read(self, shard: Shard, row: Row) -> bytes:
        """The bytes of an image file."""
        return check_bytes(self.read_unchecked(shard, row.offset, row.size), row)

    def read_unchecked(self, shard: Shard, offset: int, size: int) -> bytes:
        """Any bytes of a shard."""
        if self._process != os.getpid():  # a forked process drops the files of its parent
            self._begin()
        with self._guard:
            file = self._file(shard)
        try:
            data = file.read(offset, size)
        except OSError as error:
            raise BadImageError("unreadable", error.strerror or str(error)) from error
        self._counts["disk_bytes"] += len(data)
        return data

    def _file(self, shard: Shard) -> "_TarFile":
        if shard.name in self._open:
            self._open.move_to_end(shard.name)
            return self._open[shard.name]
        path = self._folder / shard.name
        try:
            file = _TarFile(open_regular(path))
        except OSError as error:
            raise BadImageError("missing_shard", f"{shard.name}: {error.strerror}") from error
        self._open[shard.name] = file
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return file

    def expect(self, _shards: Sequence[Shard]) -> None:
        """Nothing to do."""

    def counts(self) -> dict[str, int]:
        """Bytes read, and files that are open."""
        counts, self._counts = self._counts, Counter()
        return {**counts, "open_shards": len(self._open)}


class _TarFile:
    """A file that threads read at the same time; it is closed when nothing refers to it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._descriptor = file.fileno()
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on; fewer at the end of the file."""
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, size, offset)
        with self._lock:  # Windows has a single position
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.read(self._descriptor, size)
