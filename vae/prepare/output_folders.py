"""Output folders and files: checks before the work, and what a failed write means."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vae.system.addresses import is_remote
from vae.system.errors import UserError
from vae.system.files import (
    check_utf8,
    claim_folder,
    long_path_remedy,
    read_json,
    why_not_writable,
    write_json,
)

HIDDEN = ".prepare"  # its name in an output folder
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# DuckDB's errors contain the text of the system only: the last one is of Windows in English.
_FULL_DISK_TEXTS = ("No space left", "File too large", "not enough space on the disk")


def check_apart(input_dir: str, output_dir: str | Path, flag: str = "--output_dir") -> None:
    """UserError if the output folder is the input folder, or if one is inside the other."""
    if is_remote(input_dir) or not os.path.isdir(input_dir):
        return
    here, there = Path(input_dir).resolve(), Path(output_dir).resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UserError(
            f"{flag} {output_dir} is --input_dir {input_dir}, inside of it or around it: give another folder"
        )


_OF_DUCKDB = ("IOException", "OutOfMemoryException")  # names, so that DuckDB is not imported for them


@contextmanager
def output_folder(output_dir: str, verb: str, flag: str = "--output_dir") -> Iterator[Path]:
    """The folder, which is new, empty or of this verb; errors of the disk within become one line."""
    check_utf8(output_dir, flag, "DuckDB")
    try:
        claim_folder(Path(output_dir), verb, flag)
        yield Path(output_dir)
    except Exception as error:
        if isinstance(error, OSError) or type(error).__name__ in _OF_DUCKDB:
            raise write_error(error, output_dir, flag) from error
        raise


def check_output_file(path: str, flag: str, *, overwrite: bool) -> None:
    """UserError if the file cannot be written, or exists without --overwrite."""
    file = Path(path)
    folder = file.absolute().parent
    if file.is_dir():
        raise UserError(f"{flag} {path} is a folder: give the name of a file")
    if not folder.is_dir():
        raise UserError(f"{flag} {path}: the folder {folder} is missing: create it")
    if file.exists() and not overwrite:
        raise UserError(f"{flag} {path} exists: give another name, or add --overwrite")
    if problem := why_not_writable(folder):
        raise UserError(f"{flag} {path}: {folder} {problem}")


def write_error(error: Exception, output: str | Path, flag: str = "--output_dir") -> UserError:
    """The error for the user after writing to an output has failed; a full disk loses nothing."""
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    if number in FULL_DISK or any(text in str(error) for text in _FULL_DISK_TEXTS):
        return UserError(
            f"{flag} {output}: the disk is full: free some space, then the same command continues from here"
        )
    where = f" ({path})" if path else ""
    where += long_path_remedy(error) if isinstance(error, OSError) else ""
    reason = " ".join((getattr(error, "strerror", None) or str(error)).split())  # DuckDB's has several lines
    return UserError(f"{flag} {output} cannot be written: {reason}{where}")


def claim_content(root: Path, dataset: str, digest: str) -> None:
    """Note the hash of what a folder will contain; UserError if it has a dataset with other contents."""
    noted = root / HIDDEN / "dataset.json"
    content = {"content": digest}
    try:
        before = read_json(noted)
    except (OSError, ValueError):
        before = None
    if (root / dataset).exists() and before != content:
        raise UserError(
            f"--output_dir {root} has a dataset of other images or settings, and a dataset never changes: "
            "give a new folder"
        )
    write_json(noted, content)


def claim_settings(path: Path, settings: dict[str, Any], owner: str) -> None:
    """Write the settings that decide the content of a folder; UserError if it has other ones."""
    if not path.exists():
        write_json(path, settings, indent=1)
        return
    try:
        theirs = read_json(path)
    except (OSError, ValueError):
        theirs = None
    if not isinstance(theirs, dict):
        raise UserError(f"{owner}: {path} is damaged: give another folder, or delete this one")
    mine = json.loads(json.dumps(settings))
    if different := [name for name in mine if theirs.get(name) != mine[name]]:
        values = ", ".join(f"{name} {theirs.get(name)}" for name in different)
        raise UserError(
            f"{owner} was made with other settings ({values[:1000]}): use those, or give another folder"
        )
