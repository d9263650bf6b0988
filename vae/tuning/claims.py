"""Locks on files that end with their process, however it ends: who works on what in a shared folder."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vae.config.errors import UserError
from vae.record_locks import HELD_BY_ANOTHER, lock_byte

POLL_SECONDS = 0.02


def try_claim(path: Path) -> IO[str] | None:
    """The locked file, which its closing releases, or None if another process holds it.

    A lock belongs to a process: never claim a path twice within one. Raises UserError on a file system
    without locks, because two processes could then train the same trial.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+", encoding="utf-8")
    try:
        lock_byte(file.fileno())
    except OSError as error:
        file.close()
        if error.errno in HELD_BY_ANOTHER:
            return None
        raise UserError(
            f"--output_dir: {path} cannot be locked ({error.strerror}): use a folder on a file system with "
            "locks"
        ) from None
    return file


def wait_for_claim(path: Path) -> IO[str]:
    """The locked file, as soon as no other process holds it."""
    while (file := try_claim(path)) is None:
        time.sleep(POLL_SECONDS)
    return file


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """A context that one process at a time is in."""
    with wait_for_claim(path):
        yield


def is_claimed(path: Path) -> bool:
    """Whether another process holds the lock; a missing file has none."""
    if not path.exists():
        return False
    file = try_claim(path)
    if file is not None:
        file.close()
    return file is None


class JournalLock:
    """The lock of an Optuna journal. Optuna's own would stay for 30 s after its process was killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._file = wait_for_claim(self._path)
        return True

    def release(self) -> None:
        """Release the lock."""
        assert self._file is not None, f"{os.fspath(self._path)} is not locked"
        self._file.close()
        self._file = None
