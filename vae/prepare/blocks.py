"""Blocks of images: a slice of a list of files here; tar files and row groups of Parquet files beside.

A block has an id and gives its images one by one, in an order that never changes. The same block has the same
id in every part of a job, and another id if its files are other ones.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vae.images.decoding import read_content
from vae.images.formats import MAX_IMAGE_BYTES, BadImageError
from vae.prepare.inputs import File, as_file
from vae.shards.store import MissingError, StoreError, StoreFile, TooLargeError, read_file, stamp

FLAG = "--input_dir"
SLICE = 64  # files of a block, on average: what a killed run repeats


class Item(NamedTuple):
    """An image of a block, or what cannot be one."""

    name: str
    read: Callable[[], bytes]  # BadImageError if it cannot be read
    metadata: dict[str, Any] = {}  # noqa: RUF012 - never modified
    place: tuple[int, int, int, int] = (0, 0, 0, 0)  # in a tar file: offset, size, start and end of its texts


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a source that is worked on at once."""

    id: str  # another content has another one
    file: File  # with the images, or the folder of the files
    name: str = ""  # of the file, below the folder that all have in common
    count: int = 0  # of images; 0: not known yet

    @property
    def is_remote(self) -> bool:
        """Whether it is read from a store."""
        return isinstance(self.file, StoreFile)

    def items(self, facts: dict[str, Any] | None = None) -> Iterator[Item]:
        """Its images in their order; `facts` may get what is known about the whole block."""
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
    outputs: tuple[str, ...] = ()  # of each image, without an extension: of --mode preprocess

    def items(self, facts: dict[str, Any] | None = None) -> Iterator[Item]:
        """Its images in their order."""
        for name in self.names:
            path = f"{self.file.url}/{name}" if isinstance(self.file, StoreFile) else self.file / name
            yield Item(name, partial(_read, str(path)))


def block_id(*listing: Any) -> str:
    """The id of a block, from all that decides its content."""
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]


def given(image: bytes | BadImageError) -> Callable[[], bytes]:
    """A function that gives the bytes of an image, or raises why there are none."""
    return partial(_give, image)


def _give(image: bytes | BadImageError) -> bytes:
    if isinstance(image, BadImageError):
        raise image
    return image


def _read(path: str) -> bytes:
    """The content of an image file."""
    if isinstance(file := as_file(path, FLAG), StoreFile):
        try:
            return read_file(file, max_bytes=MAX_IMAGE_BYTES)
        except MissingError:
            raise BadImageError("unreadable", "the store does not have it") from None
        except TooLargeError as error:
            raise BadImageError("too_large", str(error)) from None
    return read_content(path)


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
