"""Tar files that others wrote, read once from front to back: the images of samples.

Members are grouped into samples as webdataset groups them: those that follow each other with one key, which
ends at the first point of the name. If none of them is an image by this rule, the names are those of people,
such as `at 12.30.png`: then the key ends at the last point.
"""

import hashlib
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import Any, BinaryIO, NamedTuple

from vae.images.folder import Skips, code_of
from vae.images.formats import EXTENSIONS_OF, MAX_IMAGE_BYTES, BadImageError
from vae.prepare.blocks import Block, File, Item, block_id, common_folder, stamp_of
from vae.shards.dataset_json import MAX_NAME_BYTES
from vae.shards.shard_images import (
    TAR_ERRORS,
    TEXT_BYTES,
    TEXTS,
    is_plain,
    metadata_of,
    split_last,
    split_name,
)
from vae.system.files import utf8_text

CHUNK_BYTES = 8 * 2**20  # size of one read
IMAGE_EXTENSIONS = {extension[1:] for names in EXTENSIONS_OF.values() for extension in names}
_BLOCK = tarfile.BLOCKSIZE
MAX_HELD = 32  # members of one key that are read before the rule for their names is chosen


class _Member(NamedTuple):
    """A member of a sample, with its content if that is an image or a text."""

    key: str
    extension: str
    info: tarfile.TarInfo
    data: bytes | BadImageError = b""

    def by_last_point(self) -> "_Member":
        """The same member of a sample whose key ends at the last point of the name."""
        key, extension = split_last(self.info.name)
        return self._replace(key=key, extension=extension)


@dataclass
class _Seen:
    """The keys of the samples of a tar file before this one, and the members that are left out."""

    keys: set[str] = field(default_factory=set)
    skips: Skips = field(default_factory=Skips)


class BrokenTarError(Exception):
    """A tar file that cannot be read to its end."""


class _Reader:
    """A file that is read once, with the SHA-256 of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_at_end = False
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """The next bytes; none at the end, and ReadError behind it."""
        if self._is_at_end:  # tarfile would read on, up to any size that a header has
            raise tarfile.ReadError("it ends within a member, or without an end mark")
        data = self._file.read(size)
        self._is_at_end = not data
        self.digest.update(data)
        return data


def tar_blocks(
    files: Sequence[File], flag: str, image_key: str | None = None, *, keeps_metadata: bool = True
) -> Iterator["TarBlock"]:
    """A block of each tar file, named below the folder that all have in common."""
    _, names = common_folder(files, flag)
    for file, name in zip(files, names, strict=True):
        block = block_id("tar", stamp_of(file), image_key, keeps_metadata)
        yield TarBlock(id=block, file=file, name=name, image_key=image_key, keeps_metadata=keeps_metadata)


@dataclass(frozen=True, kw_only=True)
class TarBlock(Block):
    """A tar file."""

    image_key: str | None = None  # extension of the images, if samples have several
    keeps_metadata: bool = True

    def items(self, facts: dict[str, Any] | None = None) -> Iterator[Item]:
        """Yield its images; `facts` gets the size and the SHA-256 of the file, and what is left out of it.

        BrokenTarError if it is not complete; OSError or StoreError if it cannot be read.
        """
        seen = _Seen()
        with self.local_file() as path, open(path, "rb") as opened:
            file = _Reader(opened)
            try:
                with tarfile.open(fileobj=file, mode="r|") as tar:  # type: ignore[call-overload]
                    for _, members in groupby(self._members(tar, seen), lambda member: member.key):
                        yield from self._group(members, seen)
                while file.read(CHUNK_BYTES):
                    pass  # what follows the end mark belongs to the SHA-256
                size = opened.tell()
                opened.seek(tar.offset)  # where it ended: at a damaged header, too
                if opened.read(_BLOCK) != bytes(_BLOCK):
                    raise tarfile.ReadError("a header is damaged")
            except (*TAR_ERRORS, RecursionError, MemoryError) as error:
                reason = " ".join(str(error).split())[:200]
                raise BrokenTarError(f"it is no tar file, or is cut or damaged ({reason})") from error
            if facts is not None:
                facts |= {"bytes": size, "sha256": file.digest.hexdigest()}
                if seen.skips.counts:
                    facts["skipped"] = {
                        code: [count, utf8_text(seen.skips.examples[code][0])]
                        for code, count in seen.skips.counts.items()
                    }

    def _members(self, tar: tarfile.TarFile, seen: _Seen) -> Iterator[_Member]:
        """The files of samples, with the content of images and texts. Other members are counted."""
        root = ""
        for number, info in enumerate(tar):
            names = split_name(info.name)
            if info.isdir():
                if number == 0:  # the folder that was packed is read whatever its name is, as --input_dir is
                    root = f"{posixpath.normpath(info.name)}/"
                continue
            if (code := code_of(posixpath.normpath(info.name).removeprefix(root))) or names is None:
                seen.skips.add(info.name, code or "other_file")
                continue
            if not is_plain(info):
                seen.skips.add(info.name, "not_a_file")
                continue
            data: bytes | BadImageError = b""
            extensions = (names[1], split_last(info.name)[1])
            if any(map(self._is_image, extensions)):
                data = _image(tar, info)
            elif self._is_text(extensions[1], info):
                data = _data(tar, info)
            yield _Member(*names, info, data)

    def _group(self, members: Iterable[_Member], seen: _Seen) -> Iterator[Item]:
        """The images of members with one key: of one sample, or of one for each name up to its last point."""
        first = list(islice(members, MAX_HELD))
        everything = chain(first, members)
        is_sample = any(self._is_image(member.extension) for member in first)
        if is_sample or not any(self._is_image(member.by_last_point().extension) for member in first):
            yield from self._sample(everything, seen)
            return
        named = map(_Member.by_last_point, everything)
        for _, own in groupby(named, lambda member: member.key):
            yield from self._sample(own, seen)

    def _sample(self, members: Iterable[_Member], seen: _Seen) -> Iterator[Item]:
        """The image of a sample; what is left out of it is counted."""
        image: _Member | None = None
        text_span = (0, 0)
        extensions = set[str]()
        texts: dict[str, bytes] = {}
        for member in members:
            key, extension, info, data = member
            if key in seen.keys or extension in extensions:
                if self._is_image(extension):
                    seen.skips.add(info.name, "duplicate_key")
                continue
            extensions.add(extension)
            if extension in TEXTS:
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                text_span = (text_span[0] if text_span[1] else info.offset, end)
                if self._is_text(extension, info) and isinstance(data, bytes):
                    texts[extension] = data
            elif self._is_image(extension) and image is None:
                image = member
            elif self.image_key is None and self._is_image(split_last(info.name)[1]):
                seen.skips.add(info.name, "several_images")
        if image:
            tar_span = (image.info.offset_data, image.info.size, *text_span)
            name = posixpath.normpath(image.info.name)
            yield Item(name, image.data, metadata_of(texts) if texts else {}, tar_span)
        elif extensions:
            seen.skips.add(key, "no_image")
        seen.keys.add(key)

    def _is_text(self, extension: str, info: tarfile.TarInfo) -> bool:
        return self.keeps_metadata and extension in TEXTS and info.size <= TEXT_BYTES

    def _is_image(self, extension: str) -> bool:
        if self.image_key is None:
            return extension in IMAGE_EXTENSIONS
        return extension == self.image_key.lower()

    def chosen(self, places: dict[int, tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Some images by their offset."""
        with self.local_file() as path, open(path, "rb") as file:
            for at, (offset, size) in sorted(places.items()):
                file.seek(offset)
                yield at, file.read(size)


def _data(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "it is a plain file"
    return file.read()


def _image(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | BadImageError:
    name = posixpath.normpath(member.name)
    if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
        return BadImageError("name_too_long", f"more than {MAX_NAME_BYTES} bytes")
    if not name.isprintable():
        return BadImageError("bad_name", "it has control characters, or is not UTF-8")
    if member.size > MAX_IMAGE_BYTES:
        return BadImageError("too_large", f"{member.size} bytes")
    return _data(tar, member)
