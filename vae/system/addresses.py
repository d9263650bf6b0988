"""Addresses of remote stores: what is one, and how it is printed and recorded."""

import os
import re
from collections.abc import Mapping
from typing import Any

_REMOTE = re.compile(r"(s3|gs|hf|https?)://", re.IGNORECASE)
# With one slash too, and within other text. Only at the beginning of a word: a search stays linear.
_ADDRESS = r"(?<![A-Za-z0-9+.-])[0-9+.-]*[A-Za-z][A-Za-z0-9+.-]+:[/\\]+"
# Everything until @, also if a password has / or spaces: it follows a colon and is not a port.
_USER = re.compile(rf"({_ADDRESS})(?:[^\s/]*|[^\s/:]*:(?!\d*(?:[/:\s]|$)).*)@")
_AS_A_FOLDER = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:(?:[/\\]|:\w)")
# An address without a query matches too, so that none is read twice; without a last quote of a shell.
_QUERY = re.compile(rf"({_ADDRESS}[^\s?#]*)(?:[?#]\S*?(?=['\"]?(?:\s|$)))?")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an address such as s3://bucket/dataset.json, and not a local path."""
    return _REMOTE.match(os.fspath(path)) is not None


def is_like_address(path: str) -> bool:
    """Whether a user meant an address, mistyped or not: as a local path it would make folders such as s3:"""
    return _AS_A_FOLDER.match(path) is not None


def address_problem(path: str | os.PathLike[str]) -> str | None:
    """The problem of an address that no store has; None for a path and for an address of a store."""
    text = os.fspath(path)
    if is_remote(text) or not is_like_address(text):
        return None
    return "is an address of another kind: give one that begins with s3://, gs://, hf://, http:// or https://"


def public_text(text: str | os.PathLike[str]) -> str:
    """The text with each address in it without user, password and query string, which may have a signature.

    Everything that is printed or written to a file has this form: messages, and words of command lines.
    """
    lines = []
    for line in os.fspath(text).split("\n"):
        head, at, tail = line.rpartition("@")  # nothing behind the last one can match _USER
        lines.append(_USER.sub(r"\1", head + at) + tail)
    return _QUERY.sub(r"\1", "\n".join(lines))


def public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with texts as `public_text` gives them."""

    def public(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [public(part) for part in value]
        return public_text(value) if isinstance(value, str) else value

    return {name: public(value) for name, value in options.items()}
