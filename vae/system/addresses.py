"""Addresses of remote stores: what is one, and how it is printed and recorded."""

import os
import re
from collections.abc import Mapping
from typing import Any

# Two letters at least: C:// is a drive of Windows.
_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_ADDRESS = r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]+"  # with one slash too, and within other text
# Everything until @, also if a password has / or spaces: it follows a colon and is not a port.
_USER = re.compile(rf"({_ADDRESS})(?:[^\s/]*|[^\s/:]*:(?!\d*(?:[/:\s]|$)).*)@")
_QUERY = re.compile(rf"({_ADDRESS}[^\s?#]*)[?#]\S*?(?=['\"]?(?:\s|$))")  # without a last quote of a shell


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an address such as s3://bucket/dataset.json, and not a local path."""
    return _REMOTE.match(os.fspath(path)) is not None


def public_text(text: str | os.PathLike[str]) -> str:
    """The text with each address in it without user, password and query string, which may have a signature.

    Everything that is printed or written to a file has this form: messages, and words of command lines.
    """
    return _QUERY.sub(r"\1", _USER.sub(r"\1", os.fspath(text)))


def public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with texts as `public_text` gives them."""
    return {name: public_text(value) if isinstance(value, str) else value for name, value in options.items()}
