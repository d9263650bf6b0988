"""The source of images as blocks: slices of a list of files, tar files, and row groups of Parquet files.

A block has an id and gives its images one by one, in an order that never changes. The same block has the same
id in every part of a job, and another id if its files are other ones.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from vae.data.manifest import image_root, is_manifest, read_rows
from vae.images.folder import OTHER_EXTENSIONS, readable_extensions, walk_images
from vae.images.formats import BadImageError
from vae.prepare.inputs import File, as_file, find_files, read_list, refuse_secrets
from vae.prepare.inside import inside
from vae.shards.index import MAX_IMAGE_BYTES
from vae.shards.store import MissingError, StoreError, StoreFile, TooLargeError, list_files, read_file, stamp
from vae.system.addresses import is_remote
from vae.system.errors import DataError
from vae.system.files import check_regular

SLICE = 64  # files of a block, on average: what a killed run repeats
RAW_EXTENSIONS = (".nef", ".cr2", ".cr3", ".arw", ".dng", ".orf", ".rw2", ".raf", ".pef", ".srw")


class Item(NamedTuple):
    """An image of a block, or what cannot be one."""

    name: str
    read: Callable[[], bytes]  # BadImageError if it cannot be read
    metadata: dict[str, Any] = {}  # noqa: RUF012 - never modified
    place: tuple[int, int, int, int] = (0, 0, 0, 0)  # in a tar file: offset, size, start and end of its texts


@dataclass(frozen=True)
class Block:
    """A part of a source that is worked on at once."""

    listing: Any  # what it has, as JSON: another listing is another block

    @cached_property
    def id(self) -> str:
        """A name that another block never has."""
        text = json.dumps([type(self).__name__, self.listing])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def count(self) -> int:
        """Its number of images; 0 if it is not known yet."""
        return 0

    @property
    def is_remote(self) -> bool:
        """Whether it is read from a store."""
        return False

    def items(self) -> Iterator[Item]:
        """Its images in their order."""
        raise NotImplementedError

    def chosen(self, places: dict[int, tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Some images, by their number, with the offset and size of each in a tar file."""
        last = max(places)
        for at, item in enumerate(self.items()):
            if at in places:
                yield at, item.read()
            if at == last:
                return


@dataclass(frozen=True)
class FileBlock(Block):
    """A slice of a list of image files."""

    root: str  # folder or address
    names: tuple[str, ...]
    flag: str
    outputs: tuple[str, ...] = ()  # of each image, without an extension: of --mode preprocess

    @property
    def count(self) -> int:
        """Its number of images."""
        return len(self.names)

    @property
    def is_remote(self) -> bool:
        """Whether it is read from a store."""
        return is_remote(self.root)

    def items(self) -> Iterator[Item]:
        """Its images in their order."""
        for at in range(len(self.names)):
            yield self.item(at)

    def item(self, at: int) -> Item:
        """One of its images."""
        return Item(self.names[at], lambda: _read(self.file(at)))

    def file(self, at: int) -> File:
        """Where one of its images is."""
        name = self.names[at]
        return as_file(
            f"{self.root}/{name}" if is_remote(self.root) else os.path.join(self.root, name), self.flag
        )

    def chosen(self, places: dict[int, tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Some images, by their number."""
        for at in sorted(places):
            yield at, self.item(at).read()


def _read(file: File) -> bytes:
    """The content of an image file."""
    if isinstance(file, StoreFile):
        try:
            return read_file(file, max_bytes=MAX_IMAGE_BYTES)
        except MissingError:
            raise BadImageError("unreadable", "the store does not have it") from None
        except TooLargeError as error:
            raise BadImageError("too_large", str(error)) from None
    try:
        check_regular(file)
        with open(file, "rb") as opened:
            before = os.fstat(opened.fileno())
            if before.st_size > MAX_IMAGE_BYTES:
                raise BadImageError("too_large", f"{before.st_size} bytes")
            data = opened.read()
            after = os.fstat(opened.fileno())
    except PermissionError:
        raise BadImageError("no_permission", "permission denied: fix its permissions") from None
    except OSError as error:
        if os.path.islink(file) and not os.path.exists(file):
            target = os.readlink(file)
            raise BadImageError("broken_link", f"links to {target}, which does not exist") from None
        raise BadImageError("unreadable", error.strerror or str(error)) from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(
        data
    ) != after.st_size:
        raise BadImageError(
            "changed_while_reading", "was written to while it was read: wait until the writer has finished"
        )
    return data


@dataclass
class Skips:
    """What a folder has that is no image file: how many of each kind, and an example."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, code: str) -> None:
        """Count an entry."""
        if code == "other_file" and name.lower().endswith(RAW_EXTENSIONS):
            code = "raw_file"
        self.counts[code] = self.counts.get(code, 0) + 1
        examples = self.examples.setdefault(code, [])
        if len(examples) < 3:
            examples.append(name)


@dataclass
class Source:
    """The blocks of --input_dir."""

    text: str  # absolute path, or address: what a folder of results is made from
    blocks: list[Block]
    unit: str  # of progress
    skips: Skips = field(default_factory=Skips)
    folder: str | None = None  # of image files on this machine
    listed: int = 0  # files, also those behind `limit`

    @property
    def count(self) -> int:
        """Number of images, or of blocks if it is not known."""
        return sum(block.count for block in self.blocks) or len(self.blocks)


def open_source(text: str, flag: str, limit: int | None = None, image_column: str | None = None) -> Source:
    """The blocks of a folder, tar files or Parquet files, a pattern, a list or an address.

    DataError, with `flag`, if there are no images. `limit`: of image files.
    """
    from vae.prepare.parquet_source import parquet_blocks
    from vae.prepare.tar_source import tar_blocks

    refuse_secrets(text, flag)
    absolute = text if is_remote(text) else os.path.realpath(text)
    kind = _kind(text, flag)
    if kind == "tar":
        files = find_files(text, flag, (".tar",))
        return Source(absolute, list(tar_blocks(files, flag)), "tar")
    if kind == "parquet":
        files = find_files(text, flag, (".parquet",))
        return Source(absolute, list(parquet_blocks(files, flag, image_column)), "row group")
    if kind == "list":
        names, root = sorted(set(read_list(text, flag))), ""
        if any(map(is_remote, names)):
            root = names[0].rpartition("/")[0]
            while not all(name.startswith(f"{root}/") for name in names):
                root = root.rpartition("/")[0]
            if root.count("/") < 2:
                raise DataError(f"{flag} {text} lists files of several stores: give a list for each")
            names = [name[len(root) + 1 :] for name in names]
        return _file_source(absolute, root, names[:limit], flag)
    if is_remote(text):
        wanted, root = readable_extensions() + OTHER_EXTENSIONS, text.rstrip("/")
        found = [name for name in list_files(StoreFile(f"{root}/", flag)) if name.lower().endswith(wanted)]
        names = sorted(name[len(root) + 1 :] for name in found if name.startswith(f"{root}/"))
        return _file_source(absolute, root, names[:limit], flag)
    if is_manifest(text) and os.path.isfile(text):
        root = str(image_root(text))
        names = sorted({row["path"] for row in read_rows(text, flag=flag)})
        for name in names:
            inside(root, name, f"{flag} {text}")
        return _file_source(absolute, root, names[:limit], flag)
    skips = Skips()
    names = sorted(walk_images(text, flag=flag, extensions=OTHER_EXTENSIONS, on_skip=skips.add))
    source = _file_source(absolute, text, names[:limit], flag)
    source.skips, source.folder, source.listed = skips, text, len(names)
    return source


def _file_source(text: str, root: str, names: Sequence[str], flag: str) -> Source:
    if not names:
        raise DataError(f"{flag} {text} contains no images: give another folder")
    return Source(text, list(file_blocks(root, names, flag)), "image")


def _kind(text: str, flag: str) -> str:
    """What a text names: tar or parquet files, a list of image files, or a folder of them."""
    lower = text.lower()
    for kind in ("tar", "parquet"):
        if lower.endswith(f".{kind}") and not os.path.isdir(text):
            return kind
    if not is_remote(text) and os.path.isdir(text):
        return _kind_of_folder(text, flag)
    if lower.endswith(".txt"):
        first = next(read_list(text, flag), "").lower()
        return next((kind for kind in ("tar", "parquet") if first.endswith(f".{kind}")), "list")
    if is_remote(text) and text.endswith("/"):
        found = list_files(StoreFile(text, flag))
        images = readable_extensions()
        if not any(name.lower().endswith(images) for name in found):
            return next(
                (k for k in ("tar", "parquet") if any(name.lower().endswith(f".{k}") for name in found)),
                "folder",
            )
    return "folder"


def _kind_of_folder(text: str, flag: str) -> str:
    """The kind of the first file by name that images may be in; image files take precedence."""
    seen = {"tar": False, "parquet": False, "mds": False, "litdata": False}

    def note(name: str, code: str) -> None:
        if code == "other_file":
            lower = name.lower()
            seen["tar"] |= lower.endswith(".tar")
            seen["parquet"] |= lower.endswith(".parquet")
            seen["mds"] |= lower.endswith((".mds", ".mds.zstd"))
            seen["litdata"] |= lower.endswith(".bin") and os.path.basename(lower).startswith("chunk-")

    if next(walk_images(text, flag=flag, extensions=OTHER_EXTENSIONS, on_skip=note), None) is not None:
        return "folder"
    for kind, name in (("mds", "MDS of mosaicml-streaming"), ("litdata", "LitData")):
        if seen[kind]:
            raise DataError(
                f"{flag} {text} is a dataset in the format {name}, which is not read: export its images to "
                "files"
            )
    return next((kind for kind in ("tar", "parquet") if seen[kind]), "folder")


def file_blocks(root: str, names: Iterable[str], flag: str) -> Iterator[Block]:
    """Slices of sorted names. A slice ends by a hash of a name, so a new file changes one slice."""
    batch: list[str] = []
    for name in names:
        batch.append(name)
        is_end = zlib.crc32(os.fsencode(name)) % SLICE == 0
        if is_end or len(batch) == 4 * SLICE:
            yield _file_block(root, batch, flag)
            batch = []
    if batch:
        yield _file_block(root, batch, flag)


def _file_block(root: str, names: list[str], flag: str) -> FileBlock:
    # A file with another size or time is read again; no result is kept because of a time alone.
    listing = [[name, *_stamp(root, name)] for name in names]
    return FileBlock(listing, root, tuple(names), flag)


def _stamp(root: str, name: str) -> list[Any]:
    if is_remote(root):
        return []
    try:
        status = os.stat(os.path.join(root, name))
        return [status.st_size, status.st_mtime_ns]
    except OSError:
        return [-1]


def stamp_of(file: File) -> list[Any]:
    """Address or path of a large file, and what changes if its content does."""
    try:
        if isinstance(file, StoreFile):
            return [file.url, *stamp(file)]
        status = file.stat()
    except (OSError, StoreError):
        return [str(file)]  # reading it reports the reason
    return [str(file), status.st_size, status.st_mtime_ns]
