"""A folder with shards of remote stores or shared disks, for all processes of a machine.

Machines may share it without harm.

A file has the SHA-256 of its shard as its name. It is written under another name, verified and renamed, so a
complete file is a good one; where others may write, a process verifies it before its first use. The files
that were used longest ago are removed, and never one that is pinned. Modification times only order the files:
clocks that differ do no harm.

All files are in FOLDER_NAME within the folder that the user names, which may have other files. Only regular
files with names that the cache makes are counted or removed, and nothing is written through a link.
"""

import multiprocessing
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vae.images.formats import BadImageError
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.shards.index import Shard
from vae.shards.store import DISK_ERRORS, TooLargeError
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.errors import UserError
from vae.system.files import atomic_path, sha256_of_file, why_not_writable
from vae.system.host import GIB
from vae.system.lock_file import LockFile, lock_file

FOLDER_NAME = "vae-trainer-shards"
LOCK_NAME = ".lock"
POLL_SECONDS = 0.1  # until another process has downloaded a shard
FULL_SECONDS = 10.0  # until a full cache or disk is looked at again
BAD_NAMES = 3  # of bad shards that are printed
FREE_SHARE, FREE_BYTES = 0.05, GIB  # of the disk that stay free: the smaller one
_SPACE = "space"  # the lock for counting and removing files
_OWN_NAME = re.compile(r"([0-9a-f]{64})\.(?:tar|npy|([0-9]{1,15})\.[0-9a-f]{8}\.part)")


class Entry(NamedTuple):
    """A shard that the cache may have."""

    name: str  # for messages
    bytes: int
    sha256: str


class _File(NamedTuple):
    """A file in the folder. A download has its final size from its beginning."""

    used_at: int  # ns
    bytes: int
    written: int
    path: Path
    key: str  # SHA-256 of the shard
    is_part: bool  # a download
    is_shared: bool  # other users may write it

    @classmethod
    def of(cls, path: Path) -> "_File | None":
        """The file if the cache wrote it: no link of any kind or other name. OSError if it is not there."""
        name = _OWN_NAME.fullmatch(path.name)
        status = path.lstat()
        if name is None or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            return None
        size = status.st_size if name[2] is None else int(name[2])
        is_shared = _others_write(status) or _others_write(path.parent.stat())
        return cls(status.st_mtime_ns, size, status.st_size, path, name[1], name[2] is not None, is_shared)


def _others_write(status: os.stat_result) -> bool:
    """Whether other users own a file or may write it; Windows does not say."""
    if sys.platform == "win32":
        return False
    return status.st_uid != os.geteuid() or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def remove_if_bad(path: Path, sha256: str) -> bool:
    """Remove a shard whose bytes have changed on the disk; whether it was bad."""
    with suppress(OSError):
        if sha256_of_file(path) == sha256:
            return False
        path.unlink()
    return True


def default_folder() -> Path:
    """`vae-trainer` in the user's cache folder."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        root = "~/Library/Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(root), "vae-trainer")


def open_cache(paths: Iterable[str | None], folder: str | None, max_gib: float) -> "ShardCache | None":
    """The cache of --cache_gib and --cache_dir, which is `folder` if it was given.

    None if none of the paths is a dataset of shards; or if no `folder` was given and all shards are local.
    """
    is_used = is_dataset if folder else has_remote_shards
    if not any(path and is_used(path) for path in paths):
        return None
    cache = ShardCache(Path(folder) if folder else default_folder(), max_gib)
    cache.keeps_local = bool(folder)
    return cache


def has_remote_shards(path: str) -> bool:
    """Whether a path is that of a dataset with shards on a remote store."""
    if is_remote(path):
        return True
    return is_dataset(path) and os.path.exists(path) and read_dataset(path).store is not None


class ShardCache:
    """At most `max_gib` of shards and their indexes, in a folder of their own within `parent`.

    Less if the disk has less room.
    """

    keeps_local = False  # whether local datasets use it too, because the user named its folder

    def __init__(self, parent: Path, max_gib: float) -> None:
        """Create the folder; UserError if it cannot be written."""
        self.folder = folder = parent / FOLDER_NAME
        self._max_bytes = int(max_gib * GIB)
        self._full_until = 0.0  # monotonic
        self._warned: set[str] = set()
        self._verified: set[str] = set()  # shards that others may have written, by SHA-256
        self._bad_before: dict[str, int] = {}  # shards to try once more: time of their mark, by SHA-256
        problem = why_not_writable(folder)
        if problem:
            raise UserError(f"--cache_dir {folder} {problem}")
        if folder.is_symlink():
            remedy = "give the folder that it points to"
            raise UserError(f"--cache_dir {parent}: its {FOLDER_NAME} is a link: {remedy}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _ = self._locks
        except OSError as error:
            raise UserError(f"--cache_dir {folder}: {error.strerror}: use another folder") from error

    @property
    def _locks(self) -> LockFile:
        return lock_file(self.folder / LOCK_NAME)

    def find(self, entry: Entry) -> Path | None:
        """The path of a shard, if it is here. One that others may have written is verified once."""
        file = self._shard(entry)
        if file is None or file.bytes != entry.bytes:
            return None
        if file.is_shared and entry.sha256 not in self._verified:
            if remove_if_bad(file.path, entry.sha256):
                return None
            self._verified.add(entry.sha256)
        return file.path

    def _shard(self, entry: Entry) -> _File | None:
        """The file of a shard, whatever its size."""
        with suppress(OSError):
            return _File.of(self.folder / f"{entry.sha256}.tar")
        return None

    def obtain(self, entry: Entry, download: Callable[[Path], None], *, anew: bool = False) -> Path | None:
        """The path of a shard, which `download` writes if it is not here; None if there is no room for it.

        Waits while another process downloads it. BadImageError if its SHA-256 is wrong twice. `anew`:
        `download` writes it also if it is here.
        """
        lock = f"download {entry.sha256}"
        while True:
            if not anew and (path := self.find(entry)):
                return path
            self._check_quarantine(entry)
            if time.monotonic() < self._full_until:
                return None
            if self._locks.try_lock(lock):
                break
            time.sleep(POLL_SECONDS)
        try:
            cached = None if anew else self.find(entry)
            if path := cached or self._fill(entry, download):
                return path
            self.warn_once(
                f"--cache_gib {self._max_bytes / GIB:g}: {self.folder} has no room for all shards that are "
                "in use, so images of the others are read one by one over the network: raise it, free some "
                "space, or lower --shuffle_shards"
            )
            return None
        except OSError as error:
            if error.errno not in DISK_ERRORS and error.filename is None:
                raise
            self._full_until = time.monotonic() + FULL_SECONDS
            self.warn_once(
                f"--cache_dir {self.folder}: {error.strerror}: images are read one by one over the network: "
                "free some space, or give another --cache_dir"
            )
            return None
        finally:
            self._locks.unlock(lock)

    def store_index(self, entry: Entry, data: bytes) -> None:
        """Keep the index of a shard, if there is room; otherwise it is fetched again when it is needed."""
        path = self.index_path(entry)
        with suppress(OSError), self._space():  # a full disk
            if self._make_room(len(data)):
                with atomic_path(path) as temporary:
                    temporary.write_bytes(data)

    def index_path(self, entry: Entry) -> Path:
        """Where the index of a shard is kept."""
        return self.folder / f"{entry.sha256}.npy"

    def pin(self, entry: Entry) -> None:
        """Keep a shard until this process ends or unpins it; it may have been removed just before."""
        while not self._locks.try_lock(entry.sha256, shared=True):
            time.sleep(POLL_SECONDS)
        self.touch(entry)

    def touch(self, entry: Entry) -> None:
        """Note that a shard is used now, if it is here."""
        with suppress(OSError):
            if file := self._shard(entry):
                os.utime(file.path)  # by the clock of the disk's machine

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`."""
        self._locks.unlock(entry.sha256)

    def remove_if_free(self, entry: Entry) -> None:
        """Remove a shard, if it is here and no process has pinned it."""
        if file := self._shard(entry):
            self._remove(file)

    def room(self) -> int:
        """Bytes that the shards of this cache may have now."""
        return self._limit(self._scan())

    def look_again(self) -> None:
        """Forget that the cache was full."""
        self._full_until = 0.0

    def retry_bad(self, shards: Iterable[Shard]) -> str | None:
        """Let the shards of these that an earlier run found bad be tried once: the store may be repaired.

        Returns a line about them, if there are any. The mark of a shard stays until it is good.
        """
        marks = {path.stem: path for path in self.folder.glob("*.bad")}
        kept = [shard for shard in shards if shard.sha256 in marks] if marks else []
        times = []
        for shard in kept:
            with suppress(OSError):  # another process has removed it
                times.append(marks[shard.sha256].lstat().st_mtime_ns)
                self._bad_before.setdefault(shard.sha256, times[-1])
        if not times:
            return None
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(times) / 1e9))
        names = ", ".join(shard.name for shard in kept[:BAD_NAMES]) + ", ..." * (len(kept) > BAD_NAMES)
        return (
            f"bad shards that earlier runs found in the store: {len(kept)}, since {when} ({names}): each is "
            "downloaded once more"
        )

    @contextmanager
    def one_reporter(self) -> Iterator[Callable[[str], None]]:
        """A function that prints a warning, unless another process of this machine does so now."""
        took = False

        def warn(text: str) -> None:
            nonlocal took
            took = took or (console.is_main_process() and self._locks.try_lock("reporter"))
            if took:
                console.warning(text)

        try:
            yield warn
        finally:
            if took:
                self._locks.unlock("reporter")

    def warn_once(self, text: str) -> None:
        """Print a warning once, unless no cache is wanted.

        Not from decoding processes: the training process notices the same.
        """
        if text not in self._warned and self._max_bytes and multiprocessing.parent_process() is None:
            self._warned.add(text)
            console.warning(text)

    def _check_quarantine(self, entry: Entry) -> None:
        """BadImageError for a shard that was found bad, unless it may be tried once more."""
        try:
            marked = (self.folder / f"{entry.sha256}.bad").lstat().st_mtime_ns
        except OSError:
            return
        if marked != self._bad_before.get(entry.sha256):  # it is another one if a process has tried since
            raise BadImageError("bad_shard", f"the store's {entry.name} is not the one of dataset.json")

    def _fill(self, entry: Entry, download: Callable[[Path], None]) -> Path | None:
        """Download a shard, a second time if it is bad and was not before; then mark it as bad."""
        name = f"{entry.sha256}.{entry.bytes}.{secrets.token_hex(4)}.part"
        part = self.folder / name
        path = self.folder / f"{entry.sha256}.tar"
        mark = self.folder / f"{entry.sha256}.bad"
        for left in self.folder.glob(f"{entry.sha256}.*.part"):  # by a process that was killed
            if _OWN_NAME.fullmatch(left.name):
                left.unlink(missing_ok=True)
        if not self._reserve(entry, part):
            return None
        try:
            for _ in range(1 if entry.sha256 in self._bad_before else 2):
                with suppress(TooLargeError):
                    download(part)
                if part.stat().st_size == entry.bytes and sha256_of_file(part) == entry.sha256:
                    os.replace(part, path)
                    with suppress(OSError):  # there is none, or it is a folder
                        mark.unlink()
                    self._verified.add(entry.sha256)
                    return path
        finally:
            part.unlink(missing_ok=True)
        self._bad_before.pop(entry.sha256, None)
        with suppress(OSError):  # it is a folder, or another machine has written it
            mark.unlink(missing_ok=True)
            mark.touch(exist_ok=False)
        self._check_quarantine(entry)
        return None

    def _reserve(self, entry: Entry, part: Path) -> bool:
        """Make room for a shard, and create `part`, which counts with its final size; False without room."""
        with self._space():
            if not self._make_room(entry.bytes):
                self._full_until = time.monotonic() + FULL_SECONDS
                return False
            part.touch()
            return True

    @contextmanager
    def _space(self) -> Iterator[None]:
        """No other process counts, adds or removes files within this context."""
        while not self._locks.try_lock(_SPACE):
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            self._locks.unlock(_SPACE)

    def _make_room(self, size: int) -> bool:
        """Remove files that were used longest ago until `size` bytes fit; whether they do."""
        files = self._scan()
        excess = sum(file.bytes for file in files) + size - self._limit(files)
        if excess <= 0:
            return True
        removable = [file for file in files if not file.is_part and self._is_free(file)]
        if excess <= sum(file.bytes for file in removable):
            for file in sorted(removable):
                excess -= self._remove(file) if excess > 0 else 0
        return excess <= 0

    def _remove(self, file: _File) -> int:
        """Remove a shard; returns the bytes that this frees."""
        if not self._locks.try_lock(file.key):  # pinned meanwhile
            return 0
        try:
            file.path.unlink()
            return file.bytes
        except OSError:  # Windows: a process reads it
            return 0
        finally:
            self._locks.unlock(file.key)

    def _limit(self, files: list[_File]) -> int:
        """Bytes that all files may have: the given limit, or what the disk has."""
        disk = shutil.disk_usage(self.folder)
        spare = min(int(FREE_SHARE * disk.total), FREE_BYTES)
        return min(self._max_bytes, sum(file.written for file in files) + disk.free - spare)

    def _is_free(self, file: _File) -> bool:
        """Whether no process has pinned a shard."""
        free = self._locks.try_lock(file.key)
        if free:
            self._locks.unlock(file.key)
        return free

    def _scan(self) -> list[_File]:
        """The shards and downloads of the folder; downloads whose process has ended are removed."""
        files = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process has removed it
                file = _File.of(path)
                if file is None:
                    continue
                lock = f"download {file.key}"
                if file.is_part and self._locks.try_lock(lock):
                    self._locks.unlock(lock)
                    path.unlink()
                    continue
                files.append(file)
        return files

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_full_until": 0.0}
