"""Files that a flag names, and blocks of images: a slice of a list of files, a tar file, a row group.

A block has an id and gives its images one by one, in an order that never changes. The same block has the same
id in every part of a job, and another id if its files are other ones.
"""

import glob
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vae.images.decoding import read_content
from vae.images.folder import code_of
from vae.images.formats import BadImageError
from vae.shards.hub_files import is_hub_dataset, parquet_files
from vae.shards.store import MissingError, StoreError, StoreFile, download, list_files, read_file, stamp
from vae.system import console
from vae.system.addresses import is_remote, public_text
from vae.system.errors import DataError, UserError
from vae.system.files import atomic_path, decode_text, read_regular, unquoted

MAX_LIST_BYTES = 2**30
COMPRESSED = re.compile(r"\.(?:tgz|tbz2?|txz|tar\.(?!idx$)\w+)$", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")

File = Path | StoreFile


def find_files(text: str, flag: str, extensions: tuple[str, ...]) -> list[File]:
    """The files with these extensions that a text names, each once; one-line errors if there are none."""
    refuse_secrets(text, flag)
    paths: dict[str, None] = {}
    for path in _paths(text, flag, extensions):
        refuse_secrets(path, flag)
        if COMPRESSED.search(path):
            raise DataError(
                f"{flag} {path} is compressed, and images are read by their offset: unpack it to a .tar"
            )
        if not path.lower().endswith(extensions):
            raise DataError(
                f"{flag} {path} is no {' or '.join(extensions)} file: give a folder, files of this kind, a "
                "pattern or a .txt list of them"
            )
        paths[path] = None
    if not paths:
        raise DataError(
            f"{flag} {text} has no {' or '.join(extensions)} files: give a folder, a pattern or a list of "
            "them"
        )
    return [as_file(path, flag) for path in paths]


def as_file(path: str, flag: str) -> File:
    """A path of this machine or an address."""
    return StoreFile(path, flag) if is_remote(path) else Path(path)


@contextmanager
def local_file(file: File) -> Iterator[Path]:
    """The path of a file on this machine; of one on a store, of a copy for as long as this context lasts."""
    if isinstance(file, Path):
        yield file
        return
    # After an error, a thread of a store's package may have the file open: Windows cannot remove it then.
    with TemporaryDirectory(prefix="vae-trainer-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, f"file{Path(file.name).suffix}")
        download(file, path)
        yield path


def refuse_secrets(path: str, flag: str) -> None:
    """UserError for an address with a password or a signature: it would be written into files."""
    if is_remote(path) and public_text(path) != path:
        raise UserError(
            f"{flag} {path}: files that are written name the address, which must have no password or "
            "signature: use credentials that fsspec finds, such as ~/.aws/credentials or .netrc"
        )


def _paths(text: str, flag: str, extensions: tuple[str, ...]) -> Iterator[str]:
    """Addresses, or absolute paths."""
    for path in expand(text):
        if not is_remote(path) and os.path.isdir(path):
            for root, folders, names in os.walk(os.path.abspath(path), onerror=partial(_warn, flag)):
                folders[:] = sorted(name for name in folders if not code_of(name))
                yield from (
                    os.path.join(root, name) for name in sorted(names) if _is_wanted(name, extensions)
                )
        elif is_hub_dataset(path):
            yield from parquet_files(path, flag)
        elif path.lower().endswith(".txt"):
            yield from read_list(path, flag)
        elif is_remote(path):
            names = list_files(StoreFile(path, flag)) if path.endswith("/") else [path]
            yield from (name for name in names if name == path or _is_wanted(name, extensions))
        elif glob.has_magic(path) and not os.path.exists(path):
            yield from map(os.path.abspath, sorted(glob.glob(path)))
        elif not path.lower().endswith(extensions) and not os.path.lexists(path):
            raise DataError(f"{flag} {path} does not exist: give a folder, a file, a pattern or a .txt list")
        else:
            yield os.path.abspath(path)


def read_list(path: str, flag: str) -> Iterator[str]:
    """The addresses and absolute paths in a text file; others are relative to its folder."""
    try:
        if is_remote(path):
            data = read_file(StoreFile(path, flag))
            folder = path.rpartition("/")[0]
        else:
            data = read_regular(path, MAX_LIST_BYTES)
            folder = str(Path(path).absolute().parent)
        text = decode_text(data)
    except (OSError, ValueError) as error:
        raise DataError(f"{flag} {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    for line in map(unquoted, text.split("\n")):
        if line and not line.startswith("#"):
            for name in expand(line):
                if is_remote(name):
                    yield name
                elif is_remote(path):
                    yield f"{folder}/{name}"
                else:
                    yield os.path.normpath(_listed(folder, name))


def _listed(folder: str, name: str) -> str:
    """The path that a line of a list means: with the separators of Windows, too."""
    path = os.path.join(folder, name)
    # Without a backslash, no file is looked for: a list may have millions of lines on a network share.
    return path if "\\" not in name or os.path.lexists(path) else path.replace("\\", "/")


def _warn(flag: str, error: OSError) -> None:
    console.warning(f"{flag}: skips {error.filename}, which cannot be read ({error.strerror})")


def _is_wanted(name: str, extensions: tuple[str, ...]) -> bool:
    """Whether a file that was not named itself is read, or is one for an error: a compressed tar file."""
    if code_of(name.rpartition("/")[2]):
        return False
    is_tar = ".tar" in extensions and COMPRESSED.search(name) is not None
    return is_tar or name.lower().endswith(extensions)


def expand(text: str) -> Iterator[str]:
    """The texts of a pattern with {00..12} and {a,b}, as a shell makes them."""
    parts = _BRACES.split(text)
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _choices(inner: str) -> Sequence[str]:
    bounds = _RANGE.fullmatch(inner)
    if bounds is None:
        return inner.split(",") if "," in inner else [f"{{{inner}}}"]
    first, last = map(int, bounds.groups())
    step = 1 if first <= last else -1
    is_padded = any(bound.startswith("0") for bound in bounds.groups())
    width = max(map(len, bounds.groups())) if is_padded else 0
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def common_folder(files: Sequence[File], flag: str) -> tuple[str, list[str]]:
    """The folder or address that files have in common, and their names below it."""
    paths = [file.url if isinstance(file, StoreFile) else _with_slashes(file) for file in files]
    folders = [path.split("/")[:-1] for path in paths]
    pairs = zip(min(folders), max(folders), strict=False)  # all others are between these two
    common = [part for part, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    # Of an address, protocol, nothing, and host or bucket are needed.
    if len(common) < (3 if is_remote(paths[0]) else 1):
        raise UserError(
            f"{flag}: {paths[0]} and {paths[-1]} have no folder in common: make a dataset of each store"
        )
    return "/".join(common) or "/", ["/".join(path.split("/")[len(common) :]) for path in paths]


def _with_slashes(path: Path) -> str:
    """A path with forward slashes, and a drive of Windows as an upper-case letter: c: is C:."""
    text = str(path).replace(os.sep, "/")
    return text[0].upper() + text[1:] if text[1:2] == ":" else text


FLAG = "--input_dir"
SLICE = 64  # files of a block, on average: what a killed run repeats


class Item(NamedTuple):
    """An image of a block, or what cannot be one."""

    name: str
    image: bytes | str | BadImageError  # its bytes, the path or address of its file, or why there are none
    metadata: dict[str, Any] = {}  # noqa: RUF012 - never modified
    tar_span: tuple[int, int, int, int] = (0, 0, 0, 0)  # offset, size, start and end of texts in a tar

    def read(self) -> bytes:
        """The bytes of the image; BadImageError if they cannot be read."""
        if isinstance(self.image, BadImageError):
            raise self.image
        if isinstance(self.image, bytes):
            return self.image
        if not isinstance(file := as_file(self.image, FLAG), StoreFile):
            return read_content(self.image)
        try:
            return read_file(file)
        except MissingError:
            raise BadImageError("unreadable", "the store does not have it") from None


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a source that is worked on at once."""

    id: str  # another content has another one
    file: File  # the file with the images, or the folder of image files
    name: str = ""  # path of the file below the folder that all files have in common
    count: int = 0  # number of images; 0: not known yet
    fetched: Path | None = None  # folder that keeps a copy of a file of a store; None: it is fetched again

    @property
    def is_remote(self) -> bool:
        """Whether it is read from a store."""
        return isinstance(self.file, StoreFile)

    @contextmanager
    def local_file(self) -> Iterator[Path]:
        """The path of its file on this machine."""
        if self.fetched is None or isinstance(self.file, Path):
            with local_file(self.file) as path:
                yield path
            return
        path = self.fetched / f"{self.id}{Path(self.file.name).suffix}"
        if not path.is_file():
            with atomic_path(path) as temporary:
                download(self.file, temporary)
        yield path

    def items(self, facts: dict[str, Any] | None = None) -> Iterator[Item]:
        """Yield its images in their order; `facts` may get what is known about the whole block."""
        raise NotImplementedError

    def chosen(self, places: dict[int, tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Some images, by their number, with the offset and size of each in a tar file."""
        last = max(places)
        for at, item in enumerate(self.items()):
            if at in places:
                yield at, item.read()
            if at == last:
                return


@dataclass(frozen=True, kw_only=True)
class FileBlock(Block):
    """A slice of a list of image files."""

    names: tuple[str, ...]
    outputs: tuple[str, ...] = ()  # stems of the output files of --mode preprocess

    def items(self, facts: dict[str, Any] | None = None) -> Iterator[Item]:
        """Yield its images in their order."""
        for name in self.names:
            path = f"{self.file.url}/{name}" if isinstance(self.file, StoreFile) else self.file / name
            yield Item(name, str(path))


def block_id(*listing: Any) -> str:
    """The id of a block, from all that decides its content."""
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]


def file_blocks(root: str, names: Iterable[str]) -> Iterator[Block]:
    """Slices of sorted names. A slice ends by a hash of a name, so a new file changes one slice."""
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if zlib.crc32(os.fsencode(name)) % SLICE == 0 or len(batch) == 4 * SLICE:
            yield _file_block(root, batch)
            batch = []
    if batch:
        yield _file_block(root, batch)


def _file_block(root: str, names: list[str]) -> FileBlock:
    # A file with another size or time is read again; no result is kept because of a time alone.
    file = as_file(root, FLAG)
    listing = [[name, *(stamp_of(file / name)[1:] if isinstance(file, Path) else ())] for name in names]
    return FileBlock(id=block_id(listing), file=file, count=len(names), names=tuple(names))


def stamp_of(file: File) -> list[Any]:
    """Address or path of a file, and what changes if its content does."""
    try:
        if isinstance(file, StoreFile):
            return [file.url, *stamp(file)]
        status = file.stat()
    except (OSError, StoreError):
        return [str(file)]  # reading it reports the reason
    return [str(file), status.st_size, status.st_mtime_ns]
