"""The list of --exclude: images that are not used. A removed image keeps its place in the order.

Each line of the text file is the name of an image in its dataset or, of shards and manifests, its key: the
SHA-256 of the image file or its first half. Needs no PyTorch.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vae.system.console import printable
from vae.system.errors import UserError
from vae.system.files import decode_text, read_regular, unquoted

MAX_BYTES = 2**28  # maximum size of a list: four million SHA-256
KEY_DIGITS = 32
# A line of sha256sum has the name of the file behind its hash.
_HASH = re.compile(r"\\?([0-9a-f]{32})(?:[0-9a-f]{32}(?: [ *].*)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class ExcludeList:
    """The keys and names of a list."""

    path: str
    sha256: str  # of the file
    keys: np.ndarray  # S32, sorted and different
    names: frozenset[str]  # a name with \ is also here with /


@dataclass(frozen=True)
class Excluded:
    """The images of a set that --exclude leaves out."""

    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), compare=False)  # sorted
    sha256: str | None = None  # of the list

    def __contains__(self, index: int) -> bool:
        place = int(np.searchsorted(self.indices, index))
        return place < len(self.indices) and int(self.indices[place]) == index

    def without(self, record: Any) -> Any:
        """The entry of a set in `split.json`, without these images."""
        if not len(self.indices):
            return record
        if isinstance(record, list):
            return [name for index, name in enumerate(record) if index not in self]
        return {**record, "excluded": len(self.indices)}


def refuse_unmatched(listed: ExcludeList) -> None:
    """UserError for a list of which no line is an image."""
    example = min(listed.names, default="") or next((key.decode() for key in listed.keys), "no line")
    raise UserError(
        f"--exclude {listed.path}: none of its lines is an image of this set, for example "
        f"{printable(example)}: give names of images or, of shards and manifests, SHA-256, or omit the flag"
    )


def read_exclude_list(path: str) -> ExcludeList:
    """Read the file of --exclude; UserError if it cannot be read or is too large."""
    try:
        data = read_regular(path, MAX_BYTES)
        words = [unquoted(line) for line in decode_text(data).split("\n")]
    except OSError as error:
        raise UserError(f"--exclude {path} cannot be read: {error.strerror}: give a text file") from None
    except ValueError as error:
        raise UserError(f"--exclude {path} is no list of keys: {error}") from None
    matches = [(word, _HASH.fullmatch(word)) for word in words if word]
    keys = [match[1].lower().encode() for _, match in matches if match]
    names = {word.removeprefix("./") for word, match in matches if not match}  # as of `find .`
    names |= {name.replace("\\", "/").removeprefix("./") for name in names}
    different = np.unique(np.array(keys, f"S{KEY_DIGITS}"))
    return ExcludeList(path, hashlib.sha256(data).hexdigest(), different, frozenset(names))


def hash_of_list(path: str | None) -> str | None:
    """The SHA-256 of the file of --exclude; None without one."""
    return None if path is None else read_exclude_list(path).sha256
