"""The source of images as blocks: slices of a list of files, tar files, and row groups of Parquet files.

A block has an id and gives its images one by one, in an order that never changes. The same block has the same
id in every part of a job, and another id if its files are other ones.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.prepare_flags import ReadingConfig
from vae.data.manifest import MANIFEST_NAME, image_root, is_manifest, read_rows
from vae.images.decoding import parse_background, read_content
from vae.images.folder import Skips, no_images, readable_extensions, walk_images
from vae.images.formats import MAX_IMAGE_BYTES, BadImageError
from vae.images.other_programs import OTHER_IMAGES, code_of
from vae.images.strict_jpeg import has_simplejpeg
from vae.prepare.folders import inside
from vae.prepare.inputs import File, as_file, common_folder, find_files, read_list, refuse_secrets
from vae.shards.store import MissingError, StoreError, StoreFile, TooLargeError, list_files, read_file, stamp
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.errors import DataError

FLAG = "--input_dir"
ARCHIVES = (".tar", ".parquet")  # of many images
SLICE = 64  # files of a block, on average: what a killed run repeats
# Datasets of other programs, by the names of their files.
PROGRAMS = {
    "MDS of mosaicml-streaming": re.compile(r"\.mds(\.zstd)?$", re.IGNORECASE),
    "LitData": re.compile(r"(^|/)chunk-[^/]*\.bin$", re.IGNORECASE),
}


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


@dataclass
class Source:
    """The blocks of --input_dir."""

    text: str  # absolute path, or address: what a folder of results is made from
    blocks: list[Block]
    unit: str  # of progress
    skips: Skips = field(default_factory=Skips)
    folder: str | None = None  # of image files on this machine
    listed: int = 0  # files, also those behind `limit`

    def manifest(self) -> Iterator[dict[str, Any]]:
        """The rows of the manifest in a folder of image files; none without one."""
        if self.folder is not None and (path := Path(self.folder) / MANIFEST_NAME).is_file():
            yield from read_rows(path, flag=FLAG)


def open_source(config: ReadingConfig) -> Source:
    """The blocks of a folder, tar files or Parquet files, a pattern, a list or an address.

    DataError if there are no images.
    """
    from vae.prepare.parquet_source import parquet_blocks
    from vae.prepare.tar_source import tar_blocks

    warn_without_simplejpeg()
    parse_background(config.background)  # a mistake is an error now, not after hours
    text = config.input_dir
    refuse_secrets(text, FLAG)
    absolute = text if is_remote(text) else os.path.realpath(text)
    kind = _kind(text)
    if kind == ".tar":
        return Source(absolute, list(tar_blocks(find_files(text, FLAG, (kind,)), FLAG)), "tar")
    if kind == ".parquet":
        blocks = parquet_blocks(find_files(text, FLAG, (kind,)), config.image_column)
        return Source(absolute, list(blocks), "row group")
    source = Source(absolute, [], "image")
    wanted = readable_extensions() + OTHER_IMAGES
    if kind == ".txt":
        files = [as_file(path, FLAG) for path in read_list(text, FLAG)]
        root, names = "", [str(file) for file in files]  # whole: another line changes no name
        if any(isinstance(file, StoreFile) for file in files):
            root, names = common_folder(files, FLAG)
    elif is_remote(text):
        root = text.rstrip("/")
        found = list_files(StoreFile(f"{root}/", FLAG))
        below = [name[len(root) + 1 :] for name in found if name.lower().endswith(wanted)]
        names = [name for name in below if not code_of(name)]
    elif is_manifest(text) and os.path.isfile(text):
        root = str(image_root(text))
        names = [row["path"] for row in read_rows(text, flag=FLAG)]
        for name in names:
            inside(root, name, f"{FLAG} {text}")
    else:
        root = source.folder = text
        names = list(walk_images(text, flag=FLAG, extensions=OTHER_IMAGES, on_skip=source.skips.add))
    names = sorted(set(names))
    if not names:
        raise no_images(text, FLAG, source.skips)
    source.listed = len(names)
    source.blocks = list(file_blocks(root, names[: config.limit]))
    return source


def warn_without_simplejpeg() -> None:
    """Print what a missing simplejpeg costs."""
    if not has_simplejpeg():
        console.warning(
            "simplejpeg is not installed: damage inside JPEG data is not detected, and reading takes 3x the "
            "time; python -m pip install simplejpeg"
        )


def _kind(text: str) -> str:
    """The extension of the files that a text names: .tar, .parquet, .txt for a list; empty for images."""
    names: Iterable[str] = [text]
    otherwise = ""
    if os.path.isdir(text):
        names = _other_files(text)
    elif text.lower().endswith(".txt"):
        names = islice(read_list(text, FLAG), 1)
        otherwise = ".txt"
    elif is_remote(text) and text.endswith("/"):
        names = list_files(StoreFile(text, FLAG))
        if any(name.lower().endswith(readable_extensions()) for name in names):
            return ""
    ends = {os.path.splitext(name.lower())[1] for name in names}
    return next((kind for kind in ARCHIVES if kind in ends), otherwise)


def _other_files(folder: str) -> set[str]:
    """An example of each extension in a folder without image files; none in one with image files.

    DataError for the dataset of another program.
    """
    examples: dict[str, str] = {}

    def note(name: str, code: str) -> None:
        if code in ("other_file", "archive"):
            program = next((program for program, names in PROGRAMS.items() if names.search(name)), None)
            examples.setdefault(program or os.path.splitext(name.lower())[1], name)

    if next(walk_images(folder, flag=FLAG, extensions=OTHER_IMAGES, on_skip=note), None) is not None:
        return set()
    if program := next((program for program in PROGRAMS if program in examples), None):
        raise DataError(
            f"{FLAG} {folder} is a dataset in the format {program}, which is not read: export its images to "
            "files"
        )
    return set(examples.values())


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
