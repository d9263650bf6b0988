"""A folder with shards of remote stores or shared disks, for all processes of a machine.

A file has its SHA-256 as its name. It is written under another name, verified once and renamed, so a complete
file is a good one. The files that were used longest ago are removed. All files are in FOLDER_NAME within the
folder that the user names; others in it are neither counted nor removed.
"""

import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from vae.images.formats import BadImageError
from vae.shards.dataset_json import (
    Row,
    Shard,
    ShardedDataset,
    check_bytes,
    is_dataset,
    max_index_bytes,
    read_dataset,
    read_index,
    read_part,
)
from vae.shards.store import StoreFile, download, is_disk_error
from vae.system.addresses import is_remote
from vae.system.errors import DataError, UserError
from vae.system.files import in_home, sha256_of_file, why_not_writable
from vae.system.host import GIB

FOLDER_NAME = "vae-trainer-shards"
POLL_SECONDS = 0.1  # until a download of another process ends
SPARE_BYTES = GIB  # of the disk that stay free
TRIES = 2  # to download a file with the right SHA-256
LOCK_DIGITS = 3  # of a SHA-256: at most 4096 files with locks, which stay
_OWN_NAME = re.compile(r"([0-9a-f]{64})\.(?:tar|npy|(\d+)\.[0-9a-f]{8}\.part)")


class _File(NamedTuple):
    """A file in the folder."""

    used_at: float
    bytes: int  # a download has its final size from its beginning
    written: int
    path: Path


def default_folder() -> Path:
    """`vae-trainer` in the user's cache folder."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        root = "~/Library/Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return in_home(root, "--cache_dir, or XDG_CACHE_HOME,") / "vae-trainer"


def open_cache(paths: Iterable[str | None], folder: str | None, max_gib: float) -> "ShardCache | None":
    """The cache of --cache_gib and --cache_dir, which is `folder` if it was given.

    None if none of the paths is a dataset of shards that it keeps.
    """
    if not any(path and is_kept(path, folder) for path in paths):
        return None
    return ShardCache(Path(folder) if folder else default_folder(), max_gib, keeps_local=bool(folder))


def is_kept(path: str, folder: str | None) -> bool:
    """Whether a cache keeps the shards of a dataset: remote ones, and with --cache_dir those elsewhere."""
    return has_remote_shards(path) or bool(folder and is_dataset(path) and not _is_inside(path, folder))


def _is_inside(path: str | Path, folder: str | Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def has_remote_shards(path: str) -> bool:
    """Whether a path is that of a dataset with shards on a remote store."""
    if is_remote(path):
        return True
    return is_dataset(path) and os.path.exists(path) and read_dataset(path).store is not None


class ShardCache:
    """At most `max_gib` of shards and their indexes, less if the disk has less room."""

    def __init__(self, parent: Path, max_gib: float, *, keeps_local: bool = False) -> None:
        """Create the folder; UserError if it cannot be written. `keeps_local`: also for local datasets."""
        self.folder = parent / FOLDER_NAME
        self.keeps_local = keeps_local
        self.max_bytes = int(max_gib * GIB)
        if problem := why_not_writable(self.folder):
            raise UserError(f"--cache_dir {self.folder} {problem}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                pass
        except (OSError, NotImplementedError) as error:  # a file system without locks
            reason = getattr(error, "strerror", None) or "its file system has no locks"
            raise UserError(f"--cache_dir {self.folder}: {reason}: use another folder") from error

    def keeps(self, dataset: ShardedDataset) -> bool:
        """Whether the shards of a dataset go through this cache."""
        return dataset.store is not None or (
            self.keeps_local and not _is_inside(dataset.folder, self.folder.parent)
        )

    def path(self, name: str, sha256: str) -> Path:
        """Where a file is, if it is here."""
        return self.folder / f"{sha256}{Path(name).suffix}"

    def obtain(self, name: str, sha256: str, size: int, fetch: Callable[[Path], None]) -> Path:
        """The path of a file of at most `size` bytes, which `fetch` writes if it is not here.

        Waits while another process does so. BadImageError if its SHA-256 is wrong TRIES times, DataError if
        there is no room.
        """
        path = self.path(name, sha256)
        try:
            with self._lock(sha256):
                if path.exists():
                    return path
                for left in self.folder.glob(f"{sha256[:LOCK_DIGITS]}*.part"):
                    if _OWN_NAME.fullmatch(left.name):  # of a process that was killed
                        _remove(left)
                part = self._reserve(name, sha256, size)
                try:
                    for _ in range(TRIES):
                        fetch(part)
                        if sha256_of_file(part) == sha256:
                            with self._lock():  # who counts the files sees one of both names
                                os.replace(part, path)
                            return path
                finally:
                    _remove(part)
        except OSError as error:
            if not is_disk_error(error):
                raise
            raise DataError(
                f"--cache_dir {self.folder}: {error.strerror}: free some space, or give a --cache_dir on "
                "another disk"
            ) from error
        raise BadImageError("bad_shard", f"the store's {name} is not the one that dataset.json lists")

    def touch(self, path: Path) -> None:
        """Note that a file is used now, if it is here."""
        with suppress(OSError):
            os.utime(path)

    def room(self) -> int:
        """Bytes that the files of this cache may have now."""
        return self._limit(self._files())

    def _lock(self, sha256: str = "") -> FileLock:
        """The lock of downloads whose SHA-256 begins alike; without one, of counting and removing files."""
        return FileLock(self.folder / f"{sha256[:LOCK_DIGITS]}.lock")

    def _reserve(self, name: str, sha256: str, size: int) -> Path:
        """Make room for a download and create its file; waits for other downloads, which can be removed."""
        while True:
            with self._lock():
                files = self._files()
                if self._make_room(files, size):
                    part = self.folder / f"{sha256}.{size}.{secrets.token_hex(4)}.part"
                    part.touch()
                    return part
            if not any(file.path.suffix == ".part" for file in files):
                raise DataError(
                    f"--cache_dir {self.folder} has no room for {name} ({size / 1e6:.0f} MB): raise "
                    "--cache_gib, free some space, or give a --cache_dir on another disk"
                )
            time.sleep(POLL_SECONDS)

    def _make_room(self, files: list[_File], size: int) -> bool:
        """Remove the files that were used longest ago until `size` bytes fit; whether they do."""
        excess = sum(file.bytes for file in files) + size - self._limit(files)
        removable = [file for file in files if file.path.suffix != ".part"]
        if excess > sum(file.bytes for file in removable):
            return False
        for file in sorted(removable):
            if excess <= 0:
                break
            with suppress(OSError):  # Windows: a process reads it
                file.path.unlink()
                excess -= file.bytes
        return excess <= 0

    def _limit(self, files: list[_File]) -> int:
        """Bytes that all files may have: the given limit, or what the disk has."""
        free = shutil.disk_usage(self.folder).free - SPARE_BYTES
        return min(self.max_bytes, sum(file.written for file in files) + free)

    def _files(self) -> list[_File]:
        """The files of the cache; downloads whose process has ended are removed."""
        files = []
        for path in self.folder.iterdir():
            name = _OWN_NAME.fullmatch(path.name)
            with suppress(OSError):  # another process has removed it
                if name and not (name[2] and self._remove_left(path, name[1])):
                    status = path.stat()
                    size = int(name[2] or status.st_size)
                    files.append(_File(status.st_mtime, size, status.st_size, path))
        return files

    def _remove_left(self, part: Path, sha256: str) -> bool:
        """Remove a download if its process has ended; whether it had."""
        try:
            with self._lock(sha256).acquire(blocking=False):
                part.unlink()
                return True
        except Timeout:
            return False


def _remove(part: Path) -> None:
    """Remove a download; what a thread of a store's package still has open on Windows stays for later."""
    with suppress(OSError):
        part.unlink()


# ---- Shards in the cache -----------------------------------------------------------------------------------

THREADS = 4  # that fetch ahead: one connection seldom has the bandwidth of a network
READ_TRIES = 5  # to open a shard that other processes remove


class CachedShards:
    """Shards in a cache, which are fetched whole: ahead by threads, or when an image of them is read."""

    def __init__(self, dataset: ShardedDataset, cache: ShardCache) -> None:
        self._dataset, self._cache = dataset, cache
        self._bad: dict[str, BadImageError] = {}  # by the SHA-256 of the shard or index
        self._read_again: set[str] = set()  # shards whose copy was damaged
        self._used: set[str] = set()
        self._counts = _no_counts()
        self._ahead = _ReadAhead(self._fetch_all)

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
        for tries in range(READ_TRIES):
            try:
                data = read_part(self._path(shard), offset, size)
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
        """Bytes and images read since the last call."""
        counts, self._counts = self._counts, _no_counts()
        return dict(counts)

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

    def want(self, shards: Sequence[Shard]) -> None:
        """Fetch these shards, in this order, and no others."""
        with self._guard:
            self._todo = deque(shards)
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
