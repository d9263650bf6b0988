"""Locks by name, between the processes of one machine or of several, in one file.

The system releases them when their process ends, however it ends, and forked processes do not inherit them.
"""

import os
import threading
from collections import Counter
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from vae.system.record_locks import FAR, lock_byte, unlock_byte


class LockFile:
    """The locks of one file. Each process opens it once: closing a file would release all its locks."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be created, or is a link."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._handle = os.open(path, flags, 0o666)
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
            if not self._shared[name] and not _lock(self._handle, _offset(name), shared):
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
                    unlock_byte(self._handle, _offset(name))


@cache
def lock_file(path: Path) -> LockFile:
    """The locks of a file, the same object for all of this process."""
    return LockFile(path)


def _offset(name: str) -> int:
    """The byte of a name. Two names may share one: they then seem to be locked together."""
    return int(sha256(name.encode()).hexdigest()[:12], 16) % FAR


def _lock(handle: int, offset: int, shared: bool) -> bool:
    """Whether no other process holds the byte. Windows has no shared locks, but removes no file in use."""
    try:
        return lock_byte(handle, offset, shared=shared)
    except OSError:  # a file system without locks
        return True
