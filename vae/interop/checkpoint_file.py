"""One checkpoint on disk: written so that a crash at any moment leaves a valid one, verified on every load.

Beside NAME.pt stands NAME.pt.sha256 in the format of `sha256sum`. Where the record is missing, the
checksums inside the file (it is a zip archive) are verified instead.
"""

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from vae.config.errors import UserError
from vae.files import sha256_of_file

FORMAT = "vae-checkpoint-1"
_CHUNK = 16 * 2**20


class DamagedCheckpointError(UserError):
    """The file is not what was saved."""


class ForeignFileError(UserError):
    """The file is no checkpoint of this toolkit."""


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (plain data and tensors) to `path`: temporary file, flush, record, rename, flush.

    Raises OSError when it cannot be written; an older file at `path` is then still whole.
    """
    temporary = path.with_name(path.name + ".tmp")
    record = record_path(path)
    temporary_record = record.with_name(record.name + ".tmp")
    try:
        digest = _write(temporary, {"format": FORMAT, **content})
        temporary_record.write_text(f"{digest}  {path.name}\n", encoding="utf-8")
        _flush(temporary_record)
        record.unlink(missing_ok=True)  # a record of an older file must not speak against the new one
        os.replace(temporary, path)
        os.replace(temporary_record, record)
        _flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        temporary_record.unlink(missing_ok=True)


class _HashedFile:
    """A file whose SHA-256 is of what was handed to it, so that a later look at the disk proves something."""

    def __init__(self, file):
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _write(path: Path, content: dict[str, Any]) -> str:
    """Write and flush; returns the SHA-256 of what was written."""
    try:
        with path.open("wb") as file:
            hashed = _HashedFile(file)
            torch.save(content, hashed)
            file.flush()
            os.fsync(file.fileno())
            return hashed.digest.hexdigest()
    except RuntimeError as error:  # a full disk reaches torch.save as RuntimeError without an errno
        raise OSError(f"cannot write {path}: {str(error).splitlines()[0]}") from error


def record_path(path: Path) -> Path:
    """Where the SHA-256 of the checkpoint at `path` stands."""
    return path.with_name(path.name + ".sha256")


def verify_checkpoint(path: Path) -> None:
    """Raise DamagedCheckpointError where the file at `path` is not what was saved."""
    record = record_path(path)
    if path.stat().st_size == 0:
        raise DamagedCheckpointError(f"{path} is empty")
    if record.exists():
        words = record.read_text(encoding="utf-8", errors="replace").split()
        if not words or sha256_of_file(path) != words[0]:
            raise DamagedCheckpointError(f"{path} is damaged: its SHA-256 is not the one in {record.name}")
        return
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # a flipped bit in the archive's own fields raises one of seven kinds
        raise DamagedCheckpointError(f"{path} is truncated or no checkpoint: {error}") from None
    if bad:
        raise DamagedCheckpointError(f"{path} is damaged: the checksum of its part {bad} is wrong")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The verified content of a checkpoint, on the CPU.

    Raises DamagedCheckpointError for a damaged file and ForeignFileError for one that is not ours.
    """
    if path.is_dir():
        raise UserError(
            f"--resume_from {path} is a folder: name a checkpoint in it, or use --output_dir {path} "
            "--resume_from latest"
        )
    if not path.is_file():
        raise UserError(f"--resume_from {path}: there is no such file")
    verify_checkpoint(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many kinds; each means the same to the user
        reason = str(error).splitlines()[0]
        raise ForeignFileError(
            f"--resume_from {path} is not a checkpoint of this toolkit: {reason}"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForeignFileError(
            f"--resume_from {path} is not a checkpoint of this toolkit: weights are read by --init_from"
        )
    return content


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows flushes names with their files and cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
