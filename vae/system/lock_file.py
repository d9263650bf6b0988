"""Locks between processes, of one machine or of several: of a whole file, and by name within one file.

They are record locks (lockf): the system releases them when their process ends, however it ends. A forked
process would share the lock of flock, and hold it after its parent was killed. The package filelock uses
flock, and has no shared locks by name, of which the cache of shards needs thousands in one file.
A process that closes a file releases all its locks on it.
"""

import errno
import os
import threading
from collections import Counter
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from vae.system.files import open_appending

_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # by another process
FAR = 2**30  # behind any text: Windows lets no other process read a locked byte

if os.name == "nt":
    import msvcrt

    def _lock(handle: int, offset: int, shared: bool) -> None:
        """Windows has no shared locks here, but removes no file in use."""
        os.lseek(handle, offset, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

    def _unlock(handle: int, offset: int) -> None:
        os.lseek(handle, offset, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]

else:
    import fcntl

    def _lock(handle: int, offset: int, shared: bool) -> None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.lockf(handle, kind | fcntl.LOCK_NB, 1, offset)

    def _unlock(handle: int, offset: int) -> None:
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, offset)


def lock_byte(handle: int, offset: int = FAR, *, shared: bool = False) -> bool:
    """Lock one byte unless another process holds it; OSError on a file system without locks."""
    try:
        _lock(handle, offset, shared)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def open_locked(path: Path) -> BinaryIO | None:
    """The file, locked until it is closed, or None if another process holds it.

    Never open a path twice within one process. Raises NotRegularError for a link or a pipe, and another
    OSError on a file system without locks.
    """
    file = open_appending(path)
    locked = False
    try:
        locked = lock_byte(file.fileno())
    finally:
        if not locked:
            file.close()
    return file if locked else None


class LockFile:
    """Locks by name in one file. Each process opens it once."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be created, or is a link."""
        self._file = open_appending(path)
        self._handle = self._file.fileno()
        self._begin()

    def _begin(self) -> None:
        self._guard = threading.Lock()
        self._shared: Counter[str] = Counter()
        self._exclusive: set[str] = set()
        self._process = os.getpid()

    def try_lock(self, name: str, *, shared: bool = False) -> bool:
        """Take a lock unless another process or thread has it; `shared`: unless it is exclusive there.

        A file system without locks refuses nothing.
        """
        if self._process != os.getpid():  # forked
            self._begin()
        with self._guard:
            if name in self._exclusive or (self._shared[name] and not shared):
                return False
            with suppress(OSError):  # a file system without locks
                if not self._shared[name] and not lock_byte(self._handle, _offset(name), shared=shared):
                    return False
            if shared:
                self._shared[name] += 1
            else:
                self._exclusive.add(name)
            return True

    def unlock(self, name: str) -> None:
        """Release a lock that this process has."""
        if self._process != os.getpid():
            return
        with self._guard:
            self._shared[name] -= self._shared[name] > 0
            self._exclusive.discard(name)
            if not self._shared[name]:
                with suppress(OSError):  # a file system without locks
                    _unlock(self._handle, _offset(name))


@cache
def lock_file(path: Path) -> LockFile:
    """The locks of a file, the same object for all of this process."""
    return LockFile(path)


def _offset(name: str) -> int:
    """The byte of a name. Two names may share one: they then seem to be locked together."""
    return int(sha256(name.encode()).hexdigest()[:12], 16) % FAR
