"""One checkpoint file: a crash at any moment leaves a valid one, and every load verifies it.

NAME.pt.sha256 beside NAME.pt contains its SHA-256 in the format of `sha256sum`. The checksums inside the
checkpoint, which is a zip archive, are verified in any case.
"""

import hashlib
import os
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from vae.config.options import Config, all_options, flatten
from vae.interop.checkpoint_content import CheckpointContent
from vae.interop.torch_file import DamagedFileError, NeedsCodeError, check_sums, read_torch_file
from vae.interop.vae_path import check_checkpoint_path
from vae.system.errors import UserError
from vae.system.files import (
    flush_file,
    flush_folder,
    open_new,
    open_new_text,
    open_regular,
    scratch_folder,
    sha256_of_file,
)

_MAX_RECORD_BYTES = 4096  # a SHA-256 and a file name
CHECKPOINT_FORMAT = 5  # increase it when keys are renamed or removed: older files are then refused


class DamagedCheckpointError(UserError):
    """The file differs from what was saved, or cannot be read."""


class ForeignFileError(UserError):
    """The file was not written by this toolkit."""


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (plain data and tensors) to `path`: temporary file, flush, SHA-256, rename, flush.

    Raises OSError if it cannot be written; an older file at `path` is then unchanged.
    """
    with scratch_folder(path.parent) as scratch:
        temporary = scratch / path.name
        record = record_path(path)
        digest = _write(temporary, {"format": CHECKPOINT_FORMAT, **content})
        with open_new_text(scratch / record.name) as file:
            file.write(f"{digest}  {path.name}\n")
        flush_file(scratch / record.name)
        record.unlink(missing_ok=True)  # the old SHA-256 would mark the new file as damaged
        os.replace(temporary, path)
        os.replace(scratch / record.name, record)
        flush_folder(path.parent)


class _HashedFile:
    """A file object that hashes what is written to it, before the bytes reach the disk."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _write(path: Path, content: dict[str, Any]) -> str:
    """Write and flush `content`; returns the SHA-256 of the written bytes."""
    try:
        with open_new(path) as file:
            hashed = _HashedFile(file)
            torch.save(content, cast(IO[bytes], hashed))  # calls only write and flush
            file.flush()
            os.fsync(file.fileno())
            return hashed.digest.hexdigest()
    except RuntimeError as error:  # torch.save reports a full disk as a RuntimeError without an errno
        raise OSError(f"cannot write {path}: {str(error).splitlines()[0]}") from error


def record_path(path: Path) -> Path:
    """Path of the file with the SHA-256 of the checkpoint at `path`."""
    return path.with_name(path.name + ".sha256")


def checkpoint_digest(path: Path) -> str:
    """The SHA-256 of a verified checkpoint; OSError if it cannot be read."""
    return _recorded_digest(path) or sha256_of_file(path)


def _recorded_digest(path: Path) -> str | None:
    """The SHA-256 in the file beside the checkpoint; None without such a file, "" if that is empty."""
    record = record_path(path)
    if not record.exists():
        return None
    with open_regular(record) as file:
        words = file.read(_MAX_RECORD_BYTES).decode("utf-8", "replace").split()
    return words[0] if words else ""


def verify_checkpoint(path: Path) -> None:
    """Raise DamagedCheckpointError if the file at `path` differs from what was saved, or cannot be read."""
    try:
        _verify(path)
    except OSError as error:
        raise DamagedCheckpointError(
            f"{error.filename or path} cannot be read: {error.strerror or error}"
        ) from None


def _verify(path: Path) -> None:
    if path.stat().st_size == 0:
        raise DamagedCheckpointError(f"{path} is empty")
    recorded = _recorded_digest(path)
    if recorded is not None and sha256_of_file(path) != recorded:
        name = record_path(path).name
        raise DamagedCheckpointError(f"{path} is damaged: its SHA-256 is not the one in {name}")


def load_checkpoint(path: Path, *, flag: str = "--resume_from") -> dict[str, Any]:
    """Verify and load a checkpoint onto the CPU; its content has all keys.

    Raises DamagedCheckpointError for a damaged file, ForeignFileError for a file that this toolkit did not
    write, and UserError for a missing file or one of another version. `flag` is the flag in the messages.
    """
    check_checkpoint_path(path, flag)
    verify_checkpoint(path)
    try:
        content = read_torch_file(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except DamagedFileError as error:
        raise DamagedCheckpointError(f"{path} is damaged or not a checkpoint: {error}") from None
    except NeedsCodeError as error:
        raise ForeignFileError(f"{flag} {path} is not a checkpoint of this toolkit: it has {error}") from None
    if not is_checkpoint(content):
        raise ForeignFileError(
            f"{flag} {path} is not a checkpoint of this toolkit: --init_from reads weights of other programs"
        )
    return checked(content, path, flag)


def is_checkpoint(content: Any) -> bool:
    """Whether the content of a file is that of a checkpoint, of any version."""
    return isinstance(content, dict) and "format" in content


def checked(content: dict[str, Any], path: Path, flag: str) -> dict[str, Any]:
    """The content of the checkpoint at `path` after its checks; raises the errors of `load_checkpoint`."""
    if difference := _difference(content):
        raise UserError(
            f"{flag} {path} is a checkpoint of another version of this toolkit ({difference}): use the "
            "version that wrote it, or train again"
        )
    if not record_path(path).exists():
        try:
            check_sums(path)
        except DamagedFileError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error}") from None
    return {**content, "config": {**flatten(Config()), **content["config"]}}


def _difference(content: dict[str, Any]) -> str:
    """How the content differs from that of this version; "" if it does not."""
    if content["format"] != CHECKPOINT_FORMAT:
        return f"format {content['format']!r:.40}, not {CHECKPOINT_FORMAT}"
    for item in fields(CheckpointContent):
        if item.name not in content:
            return f"it lacks {item.name}"
    unknown = sorted(map(str, content["config"].keys() - all_options().keys()))
    return f"it has --{unknown[0]}" if unknown else ""
