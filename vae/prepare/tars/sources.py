"""--input of --mode index: which tar files it names, and the folder or address that they have in common."""

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vae.shards.shard_list import is_tar_name
from vae.shards.store import StoreFile, list_files, read_file
from vae.system.addresses import is_remote, public_text
from vae.system.errors import DataError, UserError

FLAG = "--input"
MAX_LIST_BYTES = 2**30
_COMPRESSED = re.compile(r"\.(?:tgz|tbz2?|txz|tar\.\w+)$", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class Sources(NamedTuple):
    """The tar files of a dataset."""

    base: str  # folder or address
    names: list[str]  # below it

    def file(self, name: str) -> Path | StoreFile:
        """One of them."""
        return StoreFile(f"{self.base}/{name}", FLAG) if is_remote(self.base) else Path(self.base, name)


def find_sources(text: str, before: Sources | None = None) -> Sources:
    """The tar files of a folder, a pattern, a list or an address; one-line errors if there are none.

    `before`: tar files that are listed first, without those of `text` if that is empty.
    """
    _refuse_secrets(text)
    paths = [path.replace(os.sep, "/") for path in _paths(text)] if text else []
    if not paths and text:
        raise DataError(f"{FLAG} {text} has no tar files: give a folder, a pattern or a list of them")
    for path in paths:
        _refuse_secrets(path)
        if _COMPRESSED.search(path):
            raise DataError(
                f"{FLAG} {path} is compressed, and images are read by their offset: unpack it to a .tar"
            )
    old = [f"{before.base}/{name}" for name in before.names] if before else []
    first: dict[str, str] = {}  # of the paths to one file
    for path in [*old, *paths]:
        first.setdefault(path if is_remote(path) else os.path.realpath(path), path)
    return _with_base(list(first.values()), before.base if before else None)


def _refuse_secrets(path: str) -> None:
    if is_remote(path) and public_text(path) != path:
        raise UserError(
            f"{FLAG} {path}: dataset.json names the address, which must have no password or signature: use "
            "credentials that fsspec finds, such as ~/.aws/credentials or .netrc"
        )


def _paths(text: str) -> Iterator[str]:
    """Addresses, or absolute paths."""
    for path in _expand(text):
        if is_remote(path):
            yield from _remote_paths(path)
        elif os.path.isdir(path):
            yield from _in_folder(Path(path).absolute())
        elif path.lower().endswith(".txt"):
            yield from _listed(path)
        elif glob.has_magic(path) and not os.path.exists(path):
            yield from (os.path.abspath(found) for found in sorted(glob.glob(path)))
        else:
            yield os.path.abspath(path)


def _remote_paths(path: str) -> Iterator[str]:
    if path.endswith("/"):
        yield from filter(_is_tar, list_files(StoreFile(path, FLAG)))
    elif path.lower().endswith(".txt"):
        lines = read_file(StoreFile(path, FLAG), max_bytes=MAX_LIST_BYTES).decode("utf-8-sig")
        folder = path.rpartition("/")[0]
        for line in _lines(lines):
            yield from _expand(line if is_remote(line) else f"{folder}/{line}")
    else:
        yield path


def _in_folder(folder: Path) -> Iterator[str]:
    if (folder / "index.json").exists() and not any(folder.glob("*.tar")):
        raise DataError(
            f"{FLAG} {folder} has an index.json and no tar files: MDS of mosaicml-streaming is not read: "
            "export its images to files, and pack them with --mode shard"
        )
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (os.path.join(root, name) for name in sorted(names) if _is_tar(name))


def _listed(path: str) -> Iterator[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{FLAG} {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    folder = Path(path).absolute().parent
    for line in _lines(text):
        for name in _expand(line):
            yield name if is_remote(name) else os.path.normpath(folder / name)


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar") or _COMPRESSED.search(name) is not None


def _expand(text: str) -> Iterator[str]:
    """The texts of a pattern with {00..12} and {a,b}, as a shell makes them."""
    parts = _BRACES.split(text)
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _choices(inner: str) -> Sequence[str]:
    found = _RANGE.fullmatch(inner)
    if found is None:
        return inner.split(",") if "," in inner else [f"{{{inner}}}"]
    first, last = int(found[1]), int(found[2])
    width = max(map(len, found.groups())) if any(one.startswith("0") for one in found.groups()) else 0
    step = 1 if first <= last else -1
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def _with_base(paths: Sequence[str], base: str | None) -> Sources:
    """The paths as names below the folder that they have in common, also with this one."""
    remote = [is_remote(path) for path in paths]
    if any(remote) != all(remote) or len({path.partition("://")[0] for path in paths if is_remote(path)}) > 1:
        raise UserError(
            f"{FLAG}: {paths[0]} and {paths[-1]} have no folder in common: make a dataset of each store"
        )
    parts = [path.split("/") for path in paths]
    folders = [part[:-1] for part in parts] + ([base.split("/")] if base is not None else [])
    pairs = zip(min(folders), max(folders), strict=False)  # all others are between these two
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if count < (3 if remote[0] else 1):  # of an address: protocol, nothing, and host or bucket
        raise UserError(
            f"{FLAG}: {paths[0]} and {paths[-1]} have no folder in common: make a dataset of each store"
        )
    names = ["/".join(part[count:]) for part in parts]
    strange = next((name for name in names if not is_tar_name(name)), None)
    if strange is not None:
        raise DataError(
            f"{FLAG} {strange}: the name of a tar file must end in .tar and have only letters, digits and "
            "._=+@,- below the folder that all have in common: rename it"
        )
    return Sources("/".join(parts[0][:count]) or "/", names)
