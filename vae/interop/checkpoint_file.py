"""One checkpoint file: a crash at any moment leaves a valid one, and every load verifies it.

NAME.pt.sha256 beside NAME.pt contains its SHA-256 in the format of `sha256sum`. The checksums inside the
checkpoint, which is a zip archive, are verified in any case.
"""

import hashlib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any, BinaryIO, TypedDict, cast

import torch

from vae.config.options import Config, all_options, flatten
from vae.interop.vae_path import check_checkpoint_path
from vae.system.errors import UserError
from vae.system.files import flush_file, flush_folder, replace_file, scratch_folder, sha256_of_file, utf8_path

CHECKPOINT_FORMAT = 8  # increase it when keys are renamed or removed: older files are then refused
_ARCHIVE = b"PK\x03\x04"  # how a ZIP archive begins


class Snapshot(TypedDict):
    """What training changes, as data and tensors only, so that loading it runs no code."""

    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None  # None, here and below: the run has none
    discriminator: dict[str, torch.Tensor] | None
    optimizers: list[dict[str, Any]]  # state dicts, the autoencoder's first
    update: dict[str, torch.Tensor]
    fp16: bool
    running_sq_norms: torch.Tensor
    running_moments: torch.Tensor
    overflows_fp16: bool
    activation_scale: float
    latent_scaling: list[Any] | None  # scaling and shift; None: not measured yet
    latent_channels: dict[str, list[float]] | None  # latents_mean and latents_std; None: not known
    position: dict[str, Any]  # the fields of Position
    history: dict[str, Any]  # of History


class CheckpointContent(Snapshot):
    """The content of a checkpoint."""

    run: dict[str, Any]  # the fields of Identity
    config: dict[str, Any]
    stages: list[dict[str, Any]]  # the fields of each Stage
    provenance: dict[str, Any]  # what decides the samples of the run; config.json contains it, too
    begun_from: str
    torch_version: str


CHECKPOINT_KEYS = tuple(CheckpointContent.__annotations__)


class DamagedCheckpointError(UserError):
    """The file differs from what was saved, or cannot be read."""


def save_checkpoint(path: Path, content: CheckpointContent) -> None:
    """Write `content` (plain data and tensors) to `path`: temporary file, flush, SHA-256, rename, flush.

    Raises OSError if it cannot be written; an older file at `path` is then unchanged.
    """
    with scratch_folder(path.parent) as scratch:
        temporary = scratch / path.name
        record = record_path(path)
        digest = _write(temporary, {"format": CHECKPOINT_FORMAT, **content})
        with open(scratch / record.name, "x", encoding="utf-8", newline="") as file:
            file.write(f"{digest}  {path.name}\n")
        flush_file(scratch / record.name)
        record.unlink(missing_ok=True)  # the old SHA-256 would mark the new file as damaged
        replace_file(temporary, path)
        replace_file(scratch / record.name, record)
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
        with open(path, "xb") as file:
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
    with open(record, encoding="utf-8", errors="replace") as file:
        return "".join(file.read().split()[:1])


def verify_checkpoint(path: Path) -> None:
    """Raise DamagedCheckpointError if the file at `path` differs from what was saved, or cannot be read."""
    try:
        recorded = _recorded_digest(path)
        is_damaged = recorded is not None and sha256_of_file(path) != recorded
    except OSError as error:
        raise DamagedCheckpointError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    if is_damaged:
        name = record_path(path).name
        raise DamagedCheckpointError(f"{path} is damaged: its SHA-256 is not the one in {name}")


def load_checkpoint(path: Path) -> CheckpointContent:
    """Verify and load a checkpoint onto the CPU; its content has all keys.

    Raises DamagedCheckpointError for a damaged file, and UserError for a missing file and one of another
    version or program.
    """
    check_checkpoint_path(path)
    verify_checkpoint(path)
    try:
        content = read_torch_file(path)
    except (OSError, DamagedFileError) as error:
        raise DamagedCheckpointError(f"{path} is damaged or not a checkpoint: {error}") from None
    except NeedsCodeError as error:
        raise UserError(f"--resume_from {path} is not a checkpoint of this toolkit: it has {error}") from None
    if not is_checkpoint(content):
        raise UserError(
            f"--resume_from {path} is not a checkpoint of this toolkit: --init_from reads weights of other "
            "programs"
        )
    return checked(content, path, "--resume_from")


def is_checkpoint(content: Any) -> bool:
    """Whether the content of a file is that of a checkpoint, of any version."""
    return isinstance(content, dict) and "format" in content


def checked(content: dict[str, Any], path: Path, flag: str) -> CheckpointContent:
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
    content["config"] = flatten(Config()) | content["config"]
    return cast(CheckpointContent, content)


def _difference(content: dict[str, Any]) -> str:
    """The first difference between the content and that of this version; "" if there is none."""
    if content["format"] != CHECKPOINT_FORMAT:
        return f"format {content['format']!r:.40}, not {CHECKPOINT_FORMAT}"
    for name in CHECKPOINT_KEYS:
        if name not in content:
            return f"it lacks {name}"
    unknown = sorted(map(str, content["config"].keys() - all_options().keys()))
    return f"it has --{unknown[0]}" if unknown else ""


# ---- Files of torch.save ---------------------------------------------------------------------------------


class DamagedFileError(ValueError):
    """The file is not one of torch.save, or not all of it."""


class NeedsCodeError(ValueError):
    """The file has objects of other types, which only code can make. The message is the first type."""


def read_torch_file(path: Path) -> Any:
    """The content of the file; the numbers of its tensors are read when they are used.

    Raises OSError if the file cannot be read, DamagedFileError or NeedsCodeError.
    """
    try:
        is_whole = zipfile.is_zipfile(path)
        if is_whole and path.suffix != ".safetensors":
            with utf8_path(path) as readable:
                return torch.load(readable, map_location="cpu", weights_only=True, mmap=True)
        # PyTorch cannot map the format before 1.6, nor a file whose name selects another reader.
        with open(path, "rb") as file:
            if not is_whole and file.read(len(_ARCHIVE)) == _ARCHIVE:
                raise DamagedFileError("its end is missing")  # in torch.load, Windows' Python may crash
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damage raises many types
        text = str(error)
        if isinstance(error, pickle.UnpicklingError) and (match := re.search(r"GLOBAL ([\w.]+)", text)):
            raise NeedsCodeError(match[1]) from None
        if "TorchScript" in text:
            raise NeedsCodeError("a program for TorchScript") from None
        reason = (text.strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise DamagedFileError(f"its parts cannot be read: {reason}") from None


def check_sums(path: Path) -> None:
    """Raise DamagedFileError if a part of the archive differs from its checksum: PyTorch ignores it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise DamagedFileError(f"its parts cannot be read: {error}") from None
    if damaged is not None:
        raise DamagedFileError(f"the checksum of its part {damaged} is wrong")
