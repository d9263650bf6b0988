"""Paths from files, such as manifests and records, and whether they stay in the folder they belong to."""

import os
import re
from pathlib import Path

from vae.system.errors import DataError

# Absolute paths, drives, shares and parent folders of Linux and of Windows, refused on every system.
_OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)|\0")


def inside(folder: str | os.PathLike[str], name: str, source: str) -> Path:
    """The path of a file below a folder; DataError, with its `source`, if it could be anywhere else.

    The folders on the way to it may not be links that lead out. The file itself may be a link.
    """
    root = os.path.realpath(folder)
    if name and not _OUTSIDE.search(name) and os.path.basename(name) not in ("", os.curdir):
        path = os.path.join(root, name)
        if is_below(os.path.realpath(os.path.dirname(path)), root):
            return Path(path)
    raise DataError(f"{source}: {name[:200]!r} is not in {os.fspath(folder)}: nothing was changed")


def is_below(path: str, root: str) -> bool:
    """Whether a real path is a folder, or in it."""
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
