"""A lock on the folder of a run, so that two runs do not mix their files. Needs no PyTorch.

The lock belongs to this process alone: the system releases it when the process ends, however it ends, and
decoding processes do not inherit it.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vae.system import console
from vae.system.errors import UserError
from vae.system.files import NotRegularError, is_link, open_appending, open_regular, remove_temporary
from vae.system.folder_marker import read_marker
from vae.system.lock_file import open_locked

LOCK_NAME = ".lock"
_MAX_HOLDER_BYTES = 1024


class FolderLock:
    """The lock on one folder. `acquire` takes it, and the end of the `with` block releases it."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk; the file is closed nevertheless
                self._file.close()
            self._file = None

    def acquire(self, folder: Path) -> None:
        """Lock the `folder` of a run, unless this object has; UserError if another process holds the lock.

        A file system without locks is reported, and the run continues without one. Else what runs that were
        killed have not finished to write is removed.
        """
        if self._file is not None:
            return
        path = folder / LOCK_NAME
        try:
            file = open_locked(path)
        except NotRegularError as error:
            raise UserError(f"--output_dir {folder}: {LOCK_NAME}: {error.strerror}: remove it") from None
        except OSError as error:
            console.warning(
                f"--output_dir {folder} cannot be locked ({error.strerror}): "
                "make sure that no other run uses it"
            )
            file = open_appending(path)
        else:
            if file is None:
                holder = _holder(path) or "another process"
                raise UserError(f"--output_dir {folder} is in use by {holder}: wait, or use another folder")
            with suppress(OSError):
                remove_temporary(folder)
                for inner in folder.glob("*/"):
                    is_of_another_run = read_marker(inner) is not None  # it may be saving now
                    if not (is_link(inner) or is_of_another_run):
                        remove_temporary(inner)
        self._file = file
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:  # a full disk: the lock holds without a name, too
            console.warning(f"{path} cannot be written: {error.strerror}; training continues")


def _holder(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_MAX_HOLDER_BYTES).decode("utf-8", "replace").strip()
