"""One tar file, read once from front to back: its images and where they are, and what is wrong with others.

Members are grouped into samples as webdataset groups them: those that follow each other with one key.
"""

import hashlib
import posixpath
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from vae.config.prepare_flags import IndexConfig
from vae.images.decoding import check_header
from vae.images.formats import EXTENSIONS_OF, BadImageError
from vae.prepare.check_file import check_size
from vae.prepare.shard.write import KEY_DIGITS
from vae.prepare.tars.where import Condition, parse_where
from vae.shards.index import MAX_IMAGE_BYTES, MAX_NAME_BYTES, foreign_index
from vae.shards.members import TAR_ERRORS, TEXTS, is_plain, metadata_of, split_name
from vae.shards.shard_images import FOREIGN_BYTES
from vae.shards.shard_list import MAX_SHARD_BYTES
from vae.shards.store import StoreFile, TooLargeError, download, read_range, stamp

CHUNK_BYTES = 8 * 2**20  # that are read at once
IMAGE_EXTENSIONS = {extension[1:] for names in EXTENSIONS_OF.values() for extension in names}
MAX_LISTED = 1000  # broken members of one tar file that are listed; all are counted
# Reasons of the user's rules, which are counted and not listed.
RULES = ("too_small", "aspect", "too_many_pixels", "format", "where")
_BLOCK = tarfile.BLOCKSIZE
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class BrokenTarError(Exception):
    """A tar file that cannot be read to its end."""


class LeftOut(NamedTuple):
    """A member, or a sample, that is no image of the dataset."""

    name: str
    reason: str
    detail: str


@dataclass
class TarContent:
    """What is in a tar file."""

    rows: np.ndarray  # foreign_index (N,)
    bytes: int
    sha256: str
    counts: Counter[str]  # of what was left out, by reason
    listed: list[LeftOut]


class Source:
    """A file that is read forwards, with the SHA-256 of all its bytes, from a disk or a store."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._chunk, self._at, self._end = chunks, b"", 0, 0  # _end: of the chunk, in the file
        self._digest = hashlib.sha256()
        self.last = b""  # what the last `read` gave

    def tell(self) -> int:
        """The position in the file."""
        return self._end - len(self._chunk) + self._at

    def seek(self, position: int) -> int:
        """Go forwards, at most to the end."""
        while position > self._end and self._next():
            pass
        if position < self.tell():
            raise ValueError("a header has a negative size")
        self._at = min(len(self._chunk), self._at + position - self.tell())
        return self.tell()

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        size = max(0, size)
        part = self._chunk[self._at : self._at + size]
        self._at += len(part)
        if len(part) < size:
            parts = [part]
            while size > (have := sum(map(len, parts))) and self._next():
                parts.append(self._chunk[: size - have])
                self._at = len(parts[-1])
            part = b"".join(parts)
        self.last = part
        return part

    def finish(self) -> tuple[int, str]:
        """Size and SHA-256 of the file."""
        while self._next():
            pass
        return self._end, self._digest.hexdigest()

    def _next(self) -> bool:
        chunk = next(self._chunks, b"")
        if not chunk:
            self._at = len(self._chunk)
            return False
        self._digest.update(chunk)
        self._chunk, self._at, self._end = chunk, 0, self._end + len(chunk)
        return True


def chunks_of(file: Path | StoreFile) -> Iterator[bytes]:
    """The bytes of a file. OSError or StoreError if they cannot be read."""
    if isinstance(file, StoreFile):
        yield from _remote_chunks(file)
        return
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk


def _remote_chunks(file: StoreFile) -> Iterator[bytes]:
    """Ranges one after another, each with its tries; or a copy, if the store gives only whole files."""
    size, _ = stamp(file)
    position = 0
    try:
        while size is not None and position < size:
            chunk = read_range(file, position, min(CHUNK_BYTES, size - position))
            if not chunk:
                return
            yield chunk
            position += len(chunk)
    except TooLargeError:
        size = None
    if size is None:
        with TemporaryDirectory(prefix="vae-trainer-") as folder:
            path = Path(folder, "tar")
            download(file, path, max_bytes=MAX_SHARD_BYTES)
            yield from chunks_of(path)


@dataclass
class _Sample:
    """The members of one key that have been read."""

    key: str
    image: tuple[Any, ...] | None = None  # the first columns of its row
    name: str = ""  # of the image
    format: str = ""
    has_image: bool = False  # good or bad
    extensions: set[str] = field(default_factory=set)
    texts: dict[str, bytes] = field(default_factory=dict)
    text_start: int = -1
    text_end: int = 0


def read_tar(file: Path | StoreFile, config: IndexConfig) -> TarContent:
    """The images of a tar file that the rules of `config` allow.

    BrokenTarError if it is not complete; OSError or StoreError if it cannot be read.
    """
    source = Source(chunks_of(file))
    reader = _Reader(source, config)
    try:
        with tarfile.open(fileobj=source, mode="r:") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                reader.add(member)
                tar.members = []  # it keeps all that it has seen
    except TAR_ERRORS as error:
        raise BrokenTarError(_why_no_tar(file, error)) from error
    if source.last.strip(b"\0") or len(source.last) < _BLOCK:
        raise BrokenTarError(f"its end mark is missing after byte {source.tell()}: it is cut or damaged")
    reader.end_sample()
    return reader.content(*source.finish())


def _why_no_tar(file: Path | StoreFile, error: Exception) -> str:
    head = next(chunks_of(file), b"")
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind:
        return f"it is compressed with {kind}, and images are read by their offset: unpack it"
    return f"it is no tar file, or is cut or damaged ({' '.join(str(error).split())})"


class _Reader:
    def __init__(self, source: Source, config: IndexConfig) -> None:
        self.source, self.config = source, config
        self.conditions: Sequence[Condition] = parse_where(config.where) if config.where else ()
        self.rows: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.listed: list[LeftOut] = []
        self.sample = _Sample("")
        self.keys: set[str] = set()  # of samples
        self.images: set[bytes] = set()  # keys of rows

    def leave_out(self, name: str, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        if reason not in RULES and len(self.listed) < MAX_LISTED:
            self.listed.append(LeftOut(name, reason, detail))

    def add(self, member: tarfile.TarInfo) -> None:
        """Take one member."""
        parts = split_name(member.name)
        if parts is None or member.isdir():
            return  # as webdataset does
        if not is_plain(member):
            kind = "sparse" if member.isreg() else "link" if member.islnk() or member.issym() else "special"
            self.leave_out(member.name, kind, "its bytes are not in one piece in the tar file")
            return
        key, extension = parts
        if key != self.sample.key:
            self.end_sample()
            self.sample = _Sample(key)
        sample = self.sample
        if key in self.keys or extension in sample.extensions:
            if self._is_image(extension):
                self.leave_out(member.name, "duplicate_key", "an image before it has this key")
            return
        sample.extensions.add(extension)
        if extension in TEXTS:
            sample.text_start = member.offset if sample.text_start < 0 else sample.text_start
            sample.text_end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            if self.conditions and member.size <= FOREIGN_BYTES:
                sample.texts[extension] = self._data(member)
        elif self._is_image(extension):
            if sample.has_image:
                self.leave_out(member.name, "several_images", "its sample has an image: see --image_key")
                return
            sample.has_image = True
            try:
                self._add_image(member)
            except BadImageError as error:
                self.leave_out(member.name, error.reason, error.detail)

    def _is_image(self, extension: str) -> bool:
        if self.config.image_key is None:
            return extension in IMAGE_EXTENSIONS
        return extension == self.config.image_key.lower()

    def _data(self, member: tarfile.TarInfo) -> bytes:
        self.source.seek(member.offset_data)
        data = self.source.read(member.size)
        if len(data) < member.size:
            raise BrokenTarError(f"it ends within {member.name}")
        return data

    def _add_image(self, member: tarfile.TarInfo) -> None:
        """BadImageError if it cannot be used."""
        name = posixpath.normpath(member.name)
        if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            raise BadImageError("name_too_long", f"more than {MAX_NAME_BYTES} bytes")
        if member.size > MAX_IMAGE_BYTES:
            raise BadImageError("too_large", f"{member.size} bytes")
        data = self._data(member)
        key = hashlib.sha256(data).hexdigest()[:KEY_DIGITS].encode()
        if key in self.images:
            raise BadImageError("duplicate_image", "an image before it in the tar file has these bytes")
        kind, size = check_header(
            data, max_pixels=self.config.max_pixels, first_frame=self.config.first_frame
        )
        check_size(*size, self.config)
        if self.config.formats and kind.lower() not in self.config.formats:
            raise BadImageError("format", f"{kind} is not in --formats")
        self.sample.name, self.sample.format = name, kind.lower()
        self.sample.image = key, member.offset_data, len(data), zlib.crc32(data), *size, 0, 0

    def end_sample(self) -> None:
        """Complete the sample whose members have been read."""
        sample = self.sample
        self.keys.add(sample.key)
        if sample.image is None:
            if sample.extensions and not sample.has_image:
                self.leave_out(sample.key, "no_image", "its members: " + " ".join(sorted(sample.extensions)))
            return
        if self.conditions:
            width, height = sample.image[4:6]
            size = {"width": width, "height": height, "format": sample.format}
            metadata = metadata_of(sample.texts) | size
            if not all(condition.holds(metadata) for condition in self.conditions):
                self.leave_out(sample.name, "where", "")
                return
        self.images.add(sample.image[0])
        texts = (max(0, sample.text_start), sample.text_end)
        self.rows.append((*sample.image, *texts, sample.name.encode("utf-8", "surrogateescape")))

    def content(self, size: int, sha256: str) -> TarContent:
        """All that was read of a file of this size and hash."""
        longest = max((len(row[-1]) for row in self.rows), default=1)
        rows = np.array(self.rows, foreign_index(longest))
        return TarContent(rows, size, sha256, self.counts, self.listed)
