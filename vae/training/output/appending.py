"""Files that training does not need: a full disk ends nothing, and its lines are written later."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from vae.system import console, files
from vae.system.files import open_appending

MAX_WAITING_BYTES = 16 * 2**20  # what is kept in memory until the disk accepts it


def try_to_write(path: Path, write: Callable[[], object], quiet: bool = False) -> bool:
    """Write a file that training does not need; a failure is printed, unless `quiet`, and gives False."""
    try:
        write()
    except OSError as error:
        if not quiet:
            console.warning(f"{path} cannot be written: {error.strerror or error}; training continues")
        return False
    return True


def write_json(path: Path, content: dict[str, Any], indent: int) -> None:
    """Write a file that training does not need; on failure an older file is unchanged."""
    try_to_write(path, partial(files.write_json, path, content, indent))


class Appender:
    """Appends whole chunks to a file, at once. Its methods raise no OSError: a failure is reported once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._waiting = b""
        self._is_written = True

    def write(self, chunk: bytes) -> None:
        """Append `chunk` after everything that waits; if the disk stays full for long, it is dropped."""
        if not chunk and not self._waiting:
            return
        if len(self._waiting) + len(chunk) <= MAX_WAITING_BYTES:
            self._waiting += chunk
        self._is_written = try_to_write(self.path, self._write_waiting, quiet=not self._is_written)

    def _write_waiting(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_appending(self.path)
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Close the file; what still waits is lost."""
        self.write(b"")
        if self._file is not None:
            self._file.close()
            self._file = None
