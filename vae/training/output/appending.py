"""Files that training does not need: a full disk ends nothing, and its lines are written later."""

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter

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

    def flush(self) -> None:
        """Nothing is buffered, except for what waits."""

    def close(self) -> None:
        """Close the file; what still waits is lost."""
        self.write(b"")
        if self._file is not None:
            self._file.close()
            self._file = None


class EventFile:
    """A new event file of TensorBoard, which hides the events of earlier files from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._appender = Appender(folder / name)
        self._records = RecordWriter(self._appender)
        self._add(Event(step=first_step, file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, summary: object, step: int) -> None:
        """Add a summary from torch.utils.tensorboard.summary."""
        self._add(Event(step=step, summary=summary))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._appender.close()
