"""A lock on the folder of a run, so that two runs do not mix their files. Needs no PyTorch."""

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_marker, remove_temporary

LOCK_NAME = ".lock"
WAIT_SECONDS = 10.0  # a run that was told to stop may still be saving


class FolderLock:
    """The lock on one folder. `acquire` takes it, and the end of the `with` block releases it."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def acquire(self, folder: Path) -> None:
        """Lock the `folder` of a run, unless this object has; UserError if another process holds the lock.

        A file system without locks is reported, and the run continues without one. Else what runs that were
        killed have not finished to write is removed.
        """
        if self._lock is not None:
            return
        self._lock = FileLock(folder / LOCK_NAME)
        try:
            self._lock.acquire(timeout=WAIT_SECONDS)
        except Timeout:
            self._lock = None
            raise UserError(
                f"--output_dir {folder} is in use by another process: wait, or use another folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            console.warning(
                f"--output_dir {folder} cannot be locked ({error}): make sure that no other run uses it"
            )
            return
        with suppress(OSError):
            remove_temporary(folder)
            for inner in folder.glob("*/"):
                if read_marker(inner) is None:  # else another run, which may be saving now
                    remove_temporary(inner)
