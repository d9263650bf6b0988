"""Checks of output folders and files before the work, and what a failed write means."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vae.prepare.inside import is_below
from vae.system.addresses import is_remote
from vae.system.errors import DataError, UserError
from vae.system.files import read_json, why_not_writable, write_json
from vae.system.folder_marker import claim_folder

HIDDEN = ".prepare"  # in an output folder
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_apart(input_dir: str, output_dir: str | Path, flag: str = "--output_dir") -> None:
    """UserError if the output folder is the input folder, or if one is inside the other."""
    if is_remote(input_dir) or not os.path.isdir(input_dir):
        return
    here, there = os.path.realpath(input_dir), os.path.realpath(output_dir)
    if here == there:
        raise UserError(f"{flag} {output_dir} is --input_dir: give another folder")
    for inner, outer, text in (
        (here, there, f"--input_dir {input_dir} is inside {flag} {output_dir}"),
        (there, here, f"{flag} {output_dir} is inside --input_dir {input_dir}"),
    ):
        if is_below(inner, outer):
            raise UserError(f"{text}: give a folder outside it")


@contextmanager
def output_folder(output_dir: str, verb: str, flag: str = "--output_dir") -> Iterator[Path]:
    """The folder, which is new, empty or of this verb; errors of the disk within become one line."""
    try:
        claim_folder(Path(output_dir), verb, flag)
        yield Path(output_dir)
    except OSError as error:
        raise write_error(error, output_dir, flag) from error


def check_output_file(path: str, flag: str, *, overwrite: bool) -> None:
    """UserError if the file cannot be written, or exists without --overwrite."""
    file = Path(path)
    folder = file.absolute().parent
    if os.path.islink(file):
        raise UserError(f"{flag} {path} is a link: give another name, or remove it")
    if os.path.isdir(file):
        raise UserError(f"{flag} {path} is a folder: give the name of a file")
    if not os.path.isdir(folder):
        raise UserError(f"{flag} {path}: the folder {folder} is missing: create it")
    if os.path.exists(file) and not overwrite:
        raise UserError(f"{flag} {path} exists: give another name, or add --overwrite")
    if problem := why_not_writable(folder):
        raise UserError(f"{flag} {path}: {folder} {problem}")


def write_error(error: Exception, output: str | Path, flag: str = "--output_dir") -> UserError:
    """The error for the user after writing to an output has failed; a full disk loses nothing."""
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    if number in FULL_DISK or "No space left" in str(error):
        return UserError(
            f"{flag} {output}: the disk is full: free some space, then the same command continues from here"
        )
    where = f" ({path})" if path else ""
    return UserError(f"{flag} {output} cannot be written: {getattr(error, 'strerror', None) or error}{where}")


def claim_content(root: Path, dataset: str, digest: str, advice: str) -> None:
    """Note the hash of what a folder will contain; UserError if it has a dataset with other contents."""
    noted, content = root / HIDDEN / "dataset.json", {"content": digest}
    try:
        before = read_json(noted)
    except (OSError, ValueError):
        before = None
    if (root / dataset).exists() and before != content:
        raise UserError(
            f"--output_dir {root} has a dataset of other images or settings, and a dataset never changes: "
            f"{advice}"
        )
    write_json(noted, content)


def refuse_links(root: Path, name: str) -> Path:
    """A path in an output folder that no link leads out of; DataError otherwise.

    The folders are those that the command makes. A link at the place of the file itself is replaced, not
    followed.
    """
    path = root / name
    if not is_below(os.path.realpath(path.parent), os.path.realpath(root)):
        raise DataError(f"--output_dir {root}: {path.parent} is a link that leads out of it: remove it")
    return path
