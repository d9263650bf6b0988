"""Addresses of remote stores: what is one, and how it is printed and recorded."""

import os
import re
from urllib.parse import urlsplit, urlunsplit

# Two letters at least: C:// is a drive of Windows.
_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an address such as s3://bucket/dataset.json, and not a local path."""
    return _REMOTE.match(os.fspath(path)) is not None


def public_address(path: str | os.PathLike[str]) -> str:
    """The address without user, password and query string, which may have a signature; other paths as is.

    Everything that is printed or written to a file has this form.
    """
    path = os.fspath(path)
    if not is_remote(path):
        return path
    try:
        parts = urlsplit(path)
    except ValueError:  # for example "http://["
        return f"{path.partition('://')[0]}://..."
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
