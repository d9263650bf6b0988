"""A folder with shards of remote stores or shared disks, for all processes of a machine.

A file has its SHA-256 as its name. It is downloaded under another name, verified and renamed, so a complete
file is a good one. The files that were used longest ago are removed. All files are in FOLDER_NAME within the
folder that the user names; others in it are neither counted nor removed.
"""

import os
import re
import secrets
import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from vae.images.formats import BadImageError
from vae.shards.dataset_json import (
    Row,
    Shard,
    ShardedDataset,
    check_bytes,
    check_index,
    max_index_bytes,
    read_index,
    read_part,
)
from vae.shards.store import StoreFile, download, is_disk_error
from vae.system.errors import DataError, UserError
from vae.system.files import in_home, sha256_of_file, why_not_writable
from vae.system.host import GIB

FOLDER_NAME = "vae-trainer-shards"
SPARE_BYTES = GIB  # of the disk stay free
LOCK_DIGITS = 3  # of a SHA-256 name a lock: at most 4096 files, which stay
_Content = TypeVar("_Content")
_OWN_NAME = re.compile(r"([0-9a-f]{64})\.(?:tar|npy|[0-9a-f]{8}\.part)")
_CLAIM_NAME = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]{16})\.[0-9a-f]{8}\.claim")


class _File(NamedTuple):
    """A file in the folder; the fields order files by their last use."""

    used_at: float
    bytes: int
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


def open_cache(datasets: Iterable[ShardedDataset], folder: str | None, max_gib: float) -> "ShardCache | None":
    """The cache of --cache_gib and --cache_dir, which is `folder` if it was given.

    None if none of the datasets has shards that it keeps.
    """
    if not any(is_kept(dataset, folder) for dataset in datasets):
        return None
    return ShardCache(Path(folder) if folder else default_folder(), max_gib, keeps_local=bool(folder))


def is_kept(dataset: ShardedDataset, folder: str | Path | None) -> bool:
    """Whether a cache keeps the shards of a dataset: remote ones, and with --cache_dir those elsewhere."""
    if dataset.store is not None or folder is None:
        return dataset.store is not None
    return not Path(os.path.realpath(dataset.folder)).is_relative_to(os.path.realpath(folder))


class ShardCache:
    """At most `max_gib` of shards and their indexes, less if the disk has less room."""

    def __init__(self, parent: Path, max_gib: float, *, keeps_local: bool = False) -> None:
        """Create the folder; UserError if it cannot be written. `keeps_local`: also for local datasets."""
        self.folder = parent / FOLDER_NAME
        self.keeps_local = keeps_local
        self.max_bytes = int(max_gib * GIB)
        self._claim: FileLock | None = None
        if problem := why_not_writable(self.folder):
            raise UserError(f"--cache_dir {self.folder} {problem}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                pass
        except (OSError, NotImplementedError) as error:  # a file system without locks
            reason = getattr(error, "strerror", None) or "its file system has no locks"
            raise UserError(f"--cache_dir {self.folder}: {reason}: use another folder") from error

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the claim, which stays with its process."""
        return {**self.__dict__, "_claim": None}

    def keeps(self, dataset: ShardedDataset) -> bool:
        """Whether the shards of a dataset go through this cache."""
        return is_kept(dataset, self.folder.parent if self.keeps_local else None)

    def path(self, name: str, sha256: str) -> Path:
        """The path that a file has if it is here."""
        return self.folder / f"{sha256}{Path(name).suffix}"

    def obtain(self, name: str, sha256: str, size: int, fetch: Callable[[Path], None]) -> Path:
        """The path of a file of at most `size` bytes, which `fetch` writes if it is not here.

        Waits while another process does so. BadImageError if its SHA-256 is wrong, DataError if there is no
        room.
        """
        path = self.path(name, sha256)
        part = self.folder / f"{sha256}.{secrets.token_hex(4)}.part"
        try:
            with self._lock(sha256):
                if path.exists():
                    return path
                with self._lock():
                    self._free_space(name, size)
                    part.touch()
                try:
                    fetch(part)
                    if sha256_of_file(part) != sha256:
                        raise BadImageError(
                            "bad_shard", f"the store's {name} is not the one that dataset.json lists"
                        )
                    os.replace(part, path)
                finally:
                    with suppress(OSError):  # Windows: a thread of a store's package still has it open
                        part.unlink()
        except OSError as error:
            if not is_disk_error(error):
                raise
            raise DataError(
                f"--cache_dir {self.folder}: {error.strerror}: free some space, or give a --cache_dir on "
                "another disk"
            ) from error
        with self._lock():
            self._free_space(name, 0)
        return path

    def discard_damaged(self, path: Path) -> None:
        """Remove a file whose content has changed: whoever needs it next downloads it again."""
        with suppress(OSError):  # another process has removed it, or reads it on Windows
            if sha256_of_file(path) != path.stem:
                path.unlink()

    def available_bytes(self) -> int:
        """The size that all files of this cache may have now: the limit, or less if the disk is full."""
        return self._limit(self._files())

    def claim(self, size: int, version: str, dataset_bytes: int) -> int:
        """Note that this process reads `size` bytes of a dataset at once; returns the bytes that all read.

        Processes with the same `version` share its shards, so together they read at most `dataset_bytes`. A
        claim is the name of a lock that its process holds until it ends.
        """
        version = version[:16]
        totals = Counter({(dataset_bytes, version): size})
        with self._lock():
            for path in self.folder.glob("*.claim"):
                name = _CLAIM_NAME.fullmatch(path.name)
                if name and not self._is_free(FileLock(path), path):
                    totals[int(name[2]), name[3]] += int(name[1])
            name_of_claim = f"{size}.{dataset_bytes}.{version}.{secrets.token_hex(4)}.claim"
            self._claim = FileLock(self.folder / name_of_claim)
            self._claim.acquire()
        return sum(min(total, most) for (most, _), total in totals.items())

    def _lock(self, sha256: str = "") -> FileLock:
        """The lock of downloads whose SHA-256 begins alike; without one, of removing files."""
        return FileLock(self.folder / f"{sha256[:LOCK_DIGITS]}.lock")

    def _free_space(self, name: str, size: int) -> None:
        """Remove the files that were used longest ago until one of `size` bytes fits; DataError if none does.

        Downloads that are running count as if they had this size: while several run, the limit is not exact.
        """
        files = self._files()
        limit = self._limit(files)
        if size > max(limit, 0):
            raise DataError(
                f"--cache_dir {self.folder} has no room for {name} ({size / 1e6:.0f} MB): raise "
                "--cache_gib, free some space, or give a --cache_dir on another disk"
            )
        complete = [file for file in files if file.path.suffix != ".part"]
        excess = size * (1 + len(files) - len(complete)) + sum(file.bytes for file in complete) - limit
        for file in sorted(complete):
            if excess <= 0:
                break
            with suppress(OSError):  # Windows: a process reads it
                file.path.unlink()
                excess -= file.bytes

    def _limit(self, files: list[_File]) -> int:
        free = shutil.disk_usage(self.folder).free - SPARE_BYTES
        return min(self.max_bytes, sum(file.bytes for file in files) + free)

    def _files(self) -> list[_File]:
        """The files of the cache; downloads whose process has ended are removed."""
        files = []
        for path in self.folder.iterdir():
            name = _OWN_NAME.fullmatch(path.name)
            if name and not (path.suffix == ".part" and self._is_free(self._lock(name[1]), path)):
                with suppress(OSError):  # another process has removed it
                    status = path.stat()
                    files.append(_File(status.st_mtime, status.st_size, path))
        return files

    def _is_free(self, lock: FileLock, path: Path) -> bool:
        """Whether the process that held a lock has ended; its file is then removed."""
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        lock.release()
        with suppress(OSError):
            path.unlink()
        return True


# ---- Shards in the cache -----------------------------------------------------------------------------------

THREADS = 4  # fetch ahead: one connection seldom has the bandwidth of a network
READ_TRIES = 5  # until an error, if other processes remove a file before it is read


class CachedShards:
    """Shards in a cache, which are fetched whole: ahead by threads, or when an image of them is read."""

    def __init__(self, dataset: ShardedDataset, cache: ShardCache) -> None:
        self._dataset, self._cache = dataset, cache
        self._bad: dict[str, BadImageError] = {}  # by the SHA-256 of the shard or index
        self._counts = _no_counts()
        self._expected: deque[Shard] = deque()

    def index(self, shard: Shard) -> np.ndarray:
        """The index of a shard: index_type (samples,). BadImageError for a bad one."""
        file = self._dataset.index_file(shard)
        if isinstance(file, Path):
            return read_index(file, shard)
        return self._use(
            file,
            shard.index_sha256,
            max_index_bytes(shard),
            lambda path: check_index(path.read_bytes(), shard),
        )

    def read(self, shard: Shard, row: Row) -> bytes:
        """The bytes of an image file. BadImageError for a damaged copy, which is removed."""
        return self._read(shard, lambda path: check_bytes(read_part(path, row.offset, row.size), row))

    def read_unchecked(self, shard: Shard, offset: int, size: int) -> bytes:
        """Any bytes of a shard."""
        return self._read(shard, lambda path: read_part(path, offset, size))

    def expect(self, shards: Sequence[Shard]) -> None:
        """Fetch these shards ahead, in this order, and no others; they count as used now."""
        self._expected = deque(shards)
        for _ in range(min(THREADS, len(shards))):
            arguments = [self._expected]
            threading.Thread(target=self._fetch_all, args=arguments, name="read ahead", daemon=True).start()

    def counts(self) -> dict[str, int]:
        """Bytes and images read since the last call."""
        counts, self._counts = self._counts, _no_counts()
        return dict(counts)

    def _read(self, shard: Shard, read: Callable[[Path], bytes]) -> bytes:
        path = self._cache.path(shard.name, shard.sha256)
        self._counts["hits" if path.exists() else "misses"] += 1
        with suppress(OSError):  # it is not here, or of another user
            os.utime(path)
        data = self._use(self._dataset.shard_file(shard), shard.sha256, shard.bytes, read)
        self._counts["disk_bytes"] += len(data)
        return data

    def _use(
        self, file: Path | StoreFile, sha256: str, size: int, read: Callable[[Path], _Content]
    ) -> _Content:
        """The result of `read` for a file, which is fetched if it is not here, or removed if it is bad."""
        path = self._cache.path(file.name, sha256)
        for _ in range(READ_TRIES):
            try:
                return read(path)
            except FileNotFoundError:
                self._obtain(file, sha256, size)
            except BadImageError:
                self._cache.discard_damaged(path)
                raise
        raise DataError(
            f"--cache_dir {self._cache.folder}: other processes remove shards before they are read: raise "
            "--cache_gib"
        )

    def _fetch_all(self, shards: deque[Shard]) -> None:
        """Fetch shards until none is left, or until others are expected; several threads do."""
        while shards is self._expected:
            try:
                shard = shards.popleft()
            except IndexError:
                return
            with suppress(BadImageError, UserError, OSError):  # the process that reads the shard reports it
                self._fetch(shard)

    def _fetch(self, shard: Shard) -> None:
        """Fetch a shard and its index if they are not here, and note that the shard is used now."""
        index = self._dataset.index_file(shard)
        if isinstance(index, StoreFile):
            self._obtain(index, shard.index_sha256, max_index_bytes(shard))
        path = self._obtain(self._dataset.shard_file(shard), shard.sha256, shard.bytes)
        with suppress(OSError):
            os.utime(path)

    def _obtain(self, file: Path | StoreFile, sha256: str, size: int) -> Path:
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


def _no_counts() -> Counter[str]:
    return Counter(remote_bytes=0, disk_bytes=0, hits=0, misses=0)
