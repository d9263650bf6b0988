"""A lock on the folder of a run, so that two runs do not mix their files. Needs no PyTorch.

The lock belongs to this process alone: the system releases it when the process ends, however it ends, and
decoding processes do not inherit it. That is why it is a record lock (lockf), and not flock: a forked process
shares flock's lock, and would hold it after its parent was killed.
"""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from vae import console
from vae.config.errors import UserError
from vae.files import remove_temporary

LOCK_NAME = ".lock"
HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


class FolderLock:
    """The lock on one folder. `acquire` takes it, and the end of the `with` block releases it."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk; the file is closed nevertheless
                self._file.close()
            self._file = None

    def acquire(self, folder: Path) -> None:
        """Lock an existing `folder`, unless this object has; UserError if another process holds the lock.

        A file system without locks is reported, and the run continues without one. Else temporary files of
        runs that were killed are removed.
        """
        if self._file is not None:
            return
        file = (folder / LOCK_NAME).open("a+", encoding="utf-8")
        try:
            lock_handle(file.fileno())
        except OSError as error:
            if error.errno in HELD_BY_ANOTHER:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise UserError(
                    f"--output_dir {folder} is in use by {holder}: wait until it ends, or use another folder"
                ) from None
            console.warning(
                f"--output_dir {folder} cannot be locked ({error.strerror}): "
                "make sure that no other run uses it"
            )
        else:
            with suppress(OSError):
                remove_temporary(folder)
        self._file = file
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:  # a full disk: the lock holds without a name, too
            console.warning(f"{folder / LOCK_NAME} cannot be written: {error.strerror}; training continues")


if os.name == "nt":
    import msvcrt

    def lock_handle(handle: int) -> None:
        """Lock one byte far behind the text: Windows lets no other process read a locked byte."""
        os.lseek(handle, 2**30, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

else:
    import fcntl

    def lock_handle(handle: int) -> None:
        """Lock the whole file."""
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
