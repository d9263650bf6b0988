"""Locks on files that end with their process, however it ends: who works on what in a shared folder."""

import time
from pathlib import Path
from typing import BinaryIO

from vae.system.errors import UserError
from vae.system.lock_file import open_locked

POLL_SECONDS = 0.02


def try_claim(path: Path) -> BinaryIO | None:
    """The locked file, which its closing releases, or None if another process holds it.

    A lock belongs to a process: never claim a path twice within one. Raises UserError on a file system
    without locks, because two processes could then train the same trial.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return open_locked(path)
    except OSError as error:
        raise UserError(
            f"--output_dir: {path} cannot be locked ({error.strerror}): use a file system with locks"
        ) from None


def wait_for_claim(path: Path) -> BinaryIO:
    """The locked file, as soon as no other process holds it: a context that one process at a time is in."""
    while (file := try_claim(path)) is None:
        time.sleep(POLL_SECONDS)
    return file


def is_claimed(path: Path) -> bool:
    """Whether another process holds the lock; a missing file has none."""
    if not path.exists():
        return False
    file = try_claim(path)
    if file is not None:
        file.close()
    return file is None
