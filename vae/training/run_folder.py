"""The folder of a run: names of its files, which runs a folder contains, its lock. Needs no PyTorch."""

import re
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from vae.interop.vae_path import METRICS_NAME
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_marker, remove_temporary

RUN_COMMAND = "train"  # in the marker of the folder
RUN_NAME = "run.json"  # which run is the last one; it is written first and last
_NAME = re.compile(r"checkpoint_(epoch|step)_(\d+)\.pt")


def epoch_name(epochs: int) -> str:
    """Return the file name of the checkpoint after `epochs` epochs of the run."""
    return f"checkpoint_epoch_{epochs}.pt"


def step_name(step: int) -> str:
    """Return the file name of a checkpoint within an epoch, after `step` optimizer steps of the run."""
    return f"checkpoint_step_{step}.pt"


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, in no particular order."""
    return [path for path in folder.glob("checkpoint_*.pt") if _NAME.fullmatch(path.name)]


def contains_run(folder: Path) -> bool:
    """Whether the folder is that of a run, and the run has written into it."""
    marker = read_marker(folder)
    is_ours = marker is not None and marker.command == RUN_COMMAND
    return is_ours and (bool(checkpoint_paths(folder)) or (folder / METRICS_NAME).exists())


# ---- The lock ------------------------------------------------------------------------------------------


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

    @property
    def is_held(self) -> bool:
        """Whether this object has a lock."""
        return self._lock is not None

    def acquire(self, folder: Path) -> None:
        """Lock the `folder` of a run, unless this object has; UserError if another process holds the lock.

        A file system without locks is reported, and the run continues without one. Otherwise incomplete files
        of killed runs are removed.
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
