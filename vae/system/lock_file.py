"""A file that one process locks, of one machine or of several.

It is a record lock (lockf): the system releases it when its process ends, however it ends. A forked process
would share the lock of flock, which the package filelock uses, and hold it after its parent was killed.
"""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from vae.system.files import open_appending

_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # by another process
FAR = 2**30  # behind any text: Windows lets no other process read a locked byte

if os.name == "nt":
    import msvcrt

    def _lock(handle: int) -> None:
        os.lseek(handle, FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, FAR)


def open_locked(path: Path) -> BinaryIO | None:
    """The file, locked until it is closed, or None if another process holds it.

    Never open a path twice within one process. Raises NotRegularError for a link or a pipe, and another
    OSError on a file system without locks.
    """
    file = open_appending(path)
    try:
        _lock(file.fileno())
    except OSError as error:
        file.close()
        if error.errno in _HELD:
            return None
        raise
    return file
