"""The list of --exclude: keys of images that are not used. A removed image keeps its place in the order.

Each line of the text file is the SHA-256 of an image file or its first half, the name of an image in its
dataset, or a url or source that the dataset has recorded for it. Needs no PyTorch.
"""

import hashlib
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from vae.system.console import printable
from vae.system.errors import UserError
from vae.system.files import decode_text, read_regular, unquoted

MAX_BYTES = 2**28  # of a list: four million SHA-256
KEY_DIGITS = 32
# A line of sha256sum has the name of the file behind its hash.
_HASH = re.compile(r"\\?([0-9a-f]{32})(?:[0-9a-f]{32}(?: [ *].*)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class ExcludeList:
    """The different keys of a list, by their numbers: first the hashes, then the names."""

    path: str
    sha256: str  # of the file
    hashes: np.ndarray  # S32, sorted
    names: dict[str, int]  # the number of each; those of Windows also with /

    def __len__(self) -> int:
        return max(self.names.values(), default=len(self.hashes) - 1) + 1

    def numbers(self, digests: np.ndarray) -> np.ndarray:
        """The number of each of these hashes, -1 for those that are not in the list: int64."""
        if not len(self.hashes):
            return np.full(len(digests), -1)
        places = np.searchsorted(self.hashes, digests).clip(max=len(self.hashes) - 1)
        return np.where(self.hashes[places] == digests, places, -1)

    def key(self, number: int) -> str:
        """The text of a key."""
        if number < len(self.hashes):
            return self.hashes[number].decode()
        return next(name for name, one in self.names.items() if one == number)


@dataclass(frozen=True)
class Excluded:
    """Which images of a set are not used, and by which list."""

    indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), compare=False)  # sorted
    sha256: str | None = None  # of the list
    keys: int = 0  # of the list
    matched: int = 0  # keys of images of this set

    def __contains__(self, index: int) -> bool:
        place = int(np.searchsorted(self.indices, index))
        return place < len(self.indices) and int(self.indices[place]) == index

    def record(self) -> dict[str, Any]:
        """The form in provenance."""
        return {"exclude": self.sha256, "exclude_keys": self.keys, "exclude_matched": self.matched}

    def without(self, record: Any) -> Any:
        """What `split.json` says about a set, without these images."""
        if not len(self.indices):
            return record
        if isinstance(record, list):
            return [name for index, name in enumerate(record) if index not in self]
        return {**record, "excluded": len(self.indices)}


def unmatched_text(keys: ExcludeList, matched: np.ndarray) -> str:
    """How many keys of the list are of no image, with an example; empty if there are none."""
    missing = np.setdiff1d(np.arange(len(keys)), matched)
    if not len(missing):
        return ""
    example = printable(keys.key(int(missing[0])))
    return f"; {len(missing)} of {len(keys)} keys of {keys.path} are of no image, for example {example}"


def refuse_unmatched(keys: ExcludeList) -> None:
    """UserError for a list of which no line is an image."""
    if not len(keys):
        raise UserError(f"--exclude {keys.path} has no line: list the images to leave out, or omit the flag")
    raise UserError(
        f"--exclude {keys.path}: none of its {len(keys)} lines is an image of this set, for example "
        f"{printable(keys.key(0))}: give the SHA-256 of files or names below the folder, or omit the flag"
    )


def read_exclude_list(path: str) -> ExcludeList:
    """Read the file of --exclude; UserError if it cannot be read or is too large."""
    try:
        status = os.stat(path)
        return _read_once(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise UserError(f"--exclude {path} cannot be read: {error.strerror}: give a text file") from None
    except ValueError as error:
        raise UserError(f"--exclude {path} is no list of keys: {error}") from None


def hash_of_list(path: str | None) -> str | None:
    """The SHA-256 of the file of --exclude; None without one."""
    return None if path is None else read_exclude_list(path).sha256


@lru_cache(maxsize=1)  # it is checked first, and read later
def _read_once(path: str, _stamp: tuple[int, int, int]) -> ExcludeList:
    data = read_regular(path, MAX_BYTES)
    hashes = list[bytes]()
    words = dict[str, None]()
    for line in decode_text(data).split("\n"):
        word = unquoted(line)
        if found := _HASH.fullmatch(word):
            hashes.append(found[1].lower().encode())
        elif word:
            words[word.removeprefix("./")] = None  # as `find .` prints it
    different = np.unique(np.array(hashes, f"S{KEY_DIGITS}"))
    names = {word: len(different) + number for number, word in enumerate(words)}
    for word, number in list(names.items()):
        names.setdefault(word.replace("\\", "/").removeprefix("./"), number)
    return ExcludeList(path, hashlib.sha256(data).hexdigest(), different, names)
