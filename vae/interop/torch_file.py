"""Reading the files of torch.save: plain data and tensors. No code of a file runs."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from vae.system.files import open_regular

_ARCHIVE = b"PK\x03\x04"  # how a ZIP archive begins


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
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # What PyTorch cannot map: the format before 1.6, and a name for which it uses another reader.
        with open_regular(path) as file:
            if not is_whole and file.read(len(_ARCHIVE)) == _ARCHIVE:
                raise DamagedFileError("its end is missing")  # in torch.load, Windows' Python may crash
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damage raises many types
        text = str(error)
        if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"GLOBAL ([\w.]+)", text)):
            raise NeedsCodeError(found[1]) from None
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
