"""Tar files that others wrote, read once from front to back: the images of samples, and what cannot be one.

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
from typing import Any, NamedTuple

from vae.images.formats import EXTENSIONS_OF, MAX_IMAGE_BYTES, BadImageError
from vae.images.other_programs import code_of
from vae.prepare.blocks import Block, Item, block_id, given, stamp_of
from vae.prepare.inputs import File, common_folder, local_file
from vae.shards.index import MAX_NAME_BYTES
from vae.shards.members import TAR_ERRORS, TEXTS, is_plain, metadata_of, split_last, split_name
from vae.shards.shard_images import TEXT_BYTES
from vae.shards.store import StoreError, StoreFile
from vae.system.files import open_regular

CHUNK_BYTES = 8 * 2**20  # that are read at once
# A longer header is no name. tarfile searches it in quadratic time (CVE-2024-6232, open in Python 3.11.7).
MAX_HEADER_BYTES = 16_384
MAX_HEADERS = 16  # of one member
IMAGE_EXTENSIONS = {extension[1:] for names in EXTENSIONS_OF.values() for extension in names}
_BLOCK = tarfile.BLOCKSIZE
MAX_HELD = 32  # members of one key that are read before the rule for their names is chosen
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


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
    """What the samples of a tar file before this one were."""

    keys: set[str] = field(default_factory=set)
    beside_images: set[str] = field(default_factory=set)  # extensions, such as seg.png


class BrokenTarError(Exception):
    """A tar file that cannot be read to its end."""


class _Source:
    """A file that is read forwards, with the SHA-256 of all its bytes, from a disk or a store."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = b""
        self._start = 0  # of the chunk, in the file
        self._position = 0
        self._digest = hashlib.sha256()
        self.last = b""  # what the last `read` gave

    def tell(self) -> int:
        """The position in the file."""
        return self._position

    def seek(self, position: int) -> int:
        """Go forwards, at most to the end."""
        if position < self._position:
            raise ValueError("a header has a negative size")
        while position > (end := self._start + len(self._chunk)):
            if not self._next():
                position = end
        self._position = position
        return position

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        at = self._position - self._start
        part = self._chunk[at : at + max(0, size)]
        if len(part) < size:
            parts = [part]
            have = len(part)
            while size > have and self._next():
                parts.append(self._chunk[: size - have])
                have += len(parts[-1])
            part = b"".join(parts)
        self._position += len(part)
        self.last = part
        return part

    def finish(self) -> tuple[int, str]:
        """Size and SHA-256 of the file."""
        while self._next():
            pass
        return self._start + len(self._chunk), self._digest.hexdigest()

    def _next(self) -> bool:
        chunk = next(self._chunks, b"")
        if chunk:
            self._digest.update(chunk)
            self._start += len(self._chunk)
            self._chunk = chunk
        return bool(chunk)


def _text(field: bytes | bytearray, encoding: str, errors: str) -> str:
    return field.partition(b"\0")[0].decode(encoding, errors)


class _BoundedInfo(tarfile.TarInfo):
    """A header whose extensions are short and few."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_BoundedInfo":
        """Name and size of a plain file: decoding its owner, time and device takes a fifth of all time."""
        checksum = sum(buf) - sum(buf[148:156]) + 256  # which counts itself as spaces
        is_good = len(buf) == _BLOCK and buf.startswith(b"%06o\0" % checksum, 148)
        if not is_good or buf[156:157] != tarfile.REGTYPE:
            return super().frombuf(buf, encoding, errors)
        info = cls(_text(buf[:100], encoding, errors))
        info.size = tarfile.nti(buf[124:136])  # type: ignore[attr-defined]
        if prefix := _text(buf[345:500], encoding, errors):
            info.name = f"{prefix}/{info.name}"
        return info

    def _check_extension(self, tar: tarfile.TarFile) -> None:
        place, count = getattr(tar, "extensions", (-1, 0))
        count = count + 1 if place == self.offset else 1
        tar.extensions = (self.offset + _BLOCK + -(-self.size // _BLOCK) * _BLOCK, count)  # type: ignore[attr-defined]
        if self.size > MAX_HEADER_BYTES or count > MAX_HEADERS:
            raise tarfile.ReadError("a header is longer than any name")

    def _proc_pax(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        self._check_extension(tar)
        return super()._proc_pax(tar)  # type: ignore[misc]

    def _proc_gnulong(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        self._check_extension(tar)
        return super()._proc_gnulong(tar)  # type: ignore[misc]


def chunks_of(file: File) -> Iterator[bytes]:
    """The bytes of a file. OSError or StoreError if they cannot be read."""
    with local_file(file) as path, open_regular(path) as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk


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
        """Its images, and its members that are none; `facts` gets the size and the SHA-256 of the file.

        BrokenTarError if it is not complete; OSError or StoreError if it cannot be read.
        """
        file = _Source(chunks_of(self.file))
        seen = _Seen()
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_BoundedInfo) as tar:  # type: ignore[call-overload]
                for _, members in groupby(self._members(tar, file), lambda member: member.key):
                    yield from self._group(members, seen)
        except StoreError:
            raise
        except (*TAR_ERRORS, RecursionError) as error:
            raise BrokenTarError(_why_no_tar(self.file, error)) from error
        if file.last.strip(b"\0") or len(file.last) < _BLOCK:
            raise BrokenTarError(f"its end mark is missing after byte {file.tell()}: it is cut or damaged")
        if facts is not None:
            facts["bytes"], facts["sha256"] = file.finish()

    def _members(self, tar: tarfile.TarFile, file: _Source) -> Iterator[_Member]:
        """The members with a key; what is no plain file is with the ones before it."""
        key = ""
        while (info := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined] # it keeps all that it has seen
            names = split_name(info.name)
            if names is None or info.isdir() or code_of(posixpath.normpath(info.name)):
                continue
            key = names[0] if is_plain(info) else key
            data: bytes | BadImageError = b""
            extensions = (names[1], split_last(info.name)[1])
            if is_plain(info) and any(map(self._is_image, extensions)):
                data = _image(file, info)
            elif is_plain(info) and self._is_text(extensions[1], info):
                data = _data(file, info)
            yield _Member(key, names[1], info, data)

    def _group(self, members: Iterable[_Member], seen: _Seen) -> Iterator[Item]:
        """The images of members with one key: of one sample, or of one for each name up to its last point."""
        first = list(islice(members, MAX_HELD))
        everything = chain(first, members)
        if any(self._is_image(one.extension) for one in first):
            seen.beside_images.update(one.extension for one in first)
            yield from self._sample(everything, seen)
        elif any(
            self._is_image(split_last(one.info.name)[1]) and one.extension not in seen.beside_images
            for one in first
        ):
            named = map(_Member.by_last_point, everything)
            for _, own in groupby(named, lambda member: member.key):
                yield from self._sample(own, seen)
        else:
            yield from self._sample(everything, seen)

    def _sample(self, members: Iterable[_Member], seen: _Seen) -> Iterator[Item]:
        """The image of a sample, after its members that are left out."""
        image: _Member | None = None
        text_place = (0, 0)
        extensions = set[str]()
        texts: dict[str, bytes] = {}
        key, is_twin = "", False
        for member in members:
            key, extension, info, data = member
            is_twin = key in seen.keys
            is_image = self._is_image(extension)
            if not is_plain(info):
                kind = "link" if info.islnk() or info.issym() else "special"
                kind = "sparse" if info.isreg() else kind
                yield _left_out(info.name, kind, "its bytes are not in one piece in the tar file")
                continue
            if is_twin or extension in extensions:
                if is_image:
                    yield _left_out(info.name, "duplicate_key", "an image before it has this key")
                continue
            extensions.add(extension)
            if extension in TEXTS:
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                text_place = (text_place[0] if text_place[1] else info.offset, end)
                if self._is_text(extension, info) and isinstance(data, bytes):
                    texts[extension] = data
            elif is_image and image:
                yield _left_out(info.name, "several_images", "its sample has an image: see --image_key")
            elif is_image:
                image = member
        if image:
            place = (image.info.offset_data, image.info.size, *text_place)
            name = posixpath.normpath(image.info.name)
            yield Item(name, given(image.data), metadata_of(texts) if texts else {}, place)
        elif extensions and not is_twin:
            yield _left_out(key, "no_image", "its members: " + " ".join(sorted(extensions))[:200])
        seen.keys.add(key)

    def _is_text(self, extension: str, info: tarfile.TarInfo) -> bool:
        return self.keeps_metadata and extension in TEXTS and info.size <= TEXT_BYTES

    def _is_image(self, extension: str) -> bool:
        if self.image_key is None:
            return extension in IMAGE_EXTENSIONS
        return extension == self.image_key.lower()

    def chosen(self, places: dict[int, tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Some images: of a file of this machine by their offset."""
        if isinstance(self.file, StoreFile):
            yield from super().chosen(places)
            return
        with open_regular(self.file) as file:
            for at, (offset, size) in sorted(places.items()):
                file.seek(offset)
                yield at, file.read(size)


def _why_no_tar(file: File, error: BaseException) -> str:
    try:
        head = next(chunks_of(file), b"")
    except (OSError, StoreError):
        head = b""
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind:
        return f"it is compressed with {kind}, and images are read by their offset: unpack it"
    return f"it is no tar file, or is cut or damaged ({' '.join(str(error).split())[:200]})"


def _data(file: _Source, member: tarfile.TarInfo) -> bytes:
    file.seek(member.offset_data)
    data = file.read(member.size)
    if len(data) < member.size:
        raise BrokenTarError(f"it ends within {member.name}")
    return data


def _image(file: _Source, member: tarfile.TarInfo) -> bytes | BadImageError:
    name = posixpath.normpath(member.name)
    if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
        return BadImageError("name_too_long", f"more than {MAX_NAME_BYTES} bytes")
    if not name.isprintable():
        return BadImageError("bad_name", "it has control characters, or is not UTF-8")
    if member.size > MAX_IMAGE_BYTES:
        return BadImageError("too_large", f"{member.size} bytes")
    return _data(file, member)


def _left_out(name: str, reason: str, detail: str) -> Item:
    return Item(name, given(BadImageError(reason, detail)))
