"""Checks of --output_dir and --output_file, and what a failed write means."""

import errno
import os
from pathlib import Path

from vae.system.errors import UserError
from vae.system.files import why_not_writable

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_apart(input_dir: str, output_dir: str | Path) -> None:
    """Raise UserError if the output folder is a file, is the input folder, or if one is inside the other."""
    root = Path(output_dir)
    here, there = os.path.realpath(input_dir), os.path.realpath(root)
    if here == there:
        raise UserError(f"--output_dir {root} is --input_dir: give another folder")
    for inner, outer, text in (
        (here, there, f"--input_dir {input_dir} is inside --output_dir {root}"),
        (there, here, f"--output_dir {root} is inside --input_dir {input_dir}"),
    ):
        if inner.startswith(outer.rstrip(os.sep) + os.sep):
            raise UserError(f"{text}: give a folder outside it")
    if root.exists() and not root.is_dir():
        raise UserError(f"--output_dir {root} is a file: give a folder")


def check_new(root: Path) -> None:
    """Raise UserError if the output folder has files; hidden ones do not count."""
    if root.is_dir() and not all(entry.name.startswith(".") for entry in os.scandir(root)):
        raise UserError(f"--output_dir {root} contains other files: give a new or an empty folder")


def check_output_file(output_file: str) -> None:
    """Raise UserError if the file cannot be written."""
    folder = Path(output_file).absolute().parent
    if not folder.is_dir():
        raise UserError(f"--output_file {output_file}: the folder {folder} is missing: create it")
    if problem := why_not_writable(folder):
        raise UserError(f"--output_file {output_file}: {folder} {problem}")


def write_error(error: Exception, output: str, flag: str = "--output_dir") -> UserError:
    """The error for the user after writing to an output has failed; a full disk loses nothing."""
    if getattr(error, "errno", None) in FULL_DISK or "full" in str(error):
        return UserError(
            f"{flag} {output}: the disk is full: free some space, then the same command continues from here"
        )
    return UserError(f"{flag} {output} cannot be written: {getattr(error, 'strerror', None) or error}")
