"""One shard: a tar file in the layout of WebDataset, its index, and a note that they are complete."""

import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from vae.images.formats import BadImageError
from vae.prepare.blocks import Block
from vae.prepare.folders import HIDDEN, inside
from vae.prepare.selection import KEY_DIGITS
from vae.shards.index import Shard, index_path, index_type
from vae.system.errors import DataError
from vae.system.files import atomic_path, open_new, read_json, sha256_of_file, write_json

BLOCK_BYTES = tarfile.BLOCKSIZE  # members begin at multiples of it
_EMPTY_HEADER = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)


class Member(NamedTuple):
    """An image of a shard, where it is in the source, and what its JSON file says about it."""

    block: int
    number: int  # in its block
    position: int  # in a tar file
    sha256: str
    extension: str
    bytes: int
    size: tuple[int, int]  # width, height
    phash: str  # perceptual hash: 32 hexadecimal digits
    json: str  # ASCII

    @property
    def key(self) -> str:
        """Name of its two files within the tar file."""
        return self.sha256[:KEY_DIGITS]

    @property
    def stored_bytes(self) -> int:
        """Its bytes in the tar file: two headers, and whole blocks."""
        return sum(
            BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES for size in (self.bytes, len(self.json))
        )


class Entry(NamedTuple):
    """A file within a tar file."""

    name: str
    header: int  # position of its header, bytes
    offset: int  # of its first byte
    size: int  # bytes


@dataclass
class Plan:
    """A shard that is to be written."""

    dataset: str  # the name of the file that will list it
    name: str  # of the tar file
    members: list[Member]
    blocks: dict[int, Block]  # that have them

    def digest(self) -> str:
        """A hash of the content that the shard will have."""
        parts = [f"{member.sha256} {member.extension} {member.json}" for member in self.members]
        return hashlib.sha256("\n".join([self.name, *parts]).encode()).hexdigest()


def write_shard(root: Path, plan: Plan) -> Shard:
    """Write a shard in `root`, unless its note says that it is complete; the same plan gives the same bytes.

    DataError if an image has changed since it was checked, and OSError if writing fails.
    """
    digest = plan.digest()
    if done := _read_note(root, plan.name, digest):
        return done
    with atomic_path(inside(root, plan.name)) as temporary:
        rows, sha256 = _write_tar(temporary, plan)
        size = temporary.stat().st_size
    shard = Shard(plan.name, len(rows), size, sha256, save_index(index_path(root, plan.name), rows))
    write_json(note_path(root, shard.name), {"plan": digest, "shard": shard._asdict()})
    return shard


def save_index(path: Path, rows: np.ndarray) -> str:
    """Write the index of a shard; returns its SHA-256."""
    with atomic_path(path) as temporary, open_new(temporary) as file:
        np.save(file, rows, allow_pickle=False)
    return sha256_of_file(path)


def note_path(root: Path, name: str) -> Path:
    """The note that a shard is complete."""
    return root / HIDDEN / "shards" / f"{name}.json"


def _read_note(root: Path, name: str, digest: str) -> Shard | None:
    """The shard, if it is complete, has this content and the size that was written."""
    try:
        content = read_json(note_path(root, name))
        shard = Shard(**content["shard"])
        is_same = content["plan"] == digest and shard.name == name
        is_complete = (root / name).stat().st_size == shard.bytes
        is_complete = is_complete and sha256_of_file(index_path(root, name)) == shard.index_sha256
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return shard if is_complete and is_same else None


def _write_tar(path: Path, plan: Plan) -> tuple[np.ndarray, str]:
    """Write a tar file; returns its index, index_type (N,), and its SHA-256."""
    rows = np.zeros(len(plan.members), index_type(KEY_DIGITS))
    with open_new(path) as file:
        tar = _TarWriter(file)
        for at, (member, data) in enumerate(_read_members(plan)):
            image = tar.add(f"{member.key}.{member.extension}", data)
            text = tar.add(f"{member.key}.json", member.json.encode()).header, tar.size
            phash = int(member.phash[:16], 16), int(member.phash[16:], 16)
            key = member.key.encode()
            crc32 = zlib.crc32(data)
            rows[at] = (key, image.offset, image.size, crc32, *member.size, *phash, *text, key)
        tar.finish()
    return rows, tar.digest.hexdigest()


class _TarWriter:
    """Writes the bytes that `tarfile` writes, without time, owner or other traces of this machine.

    For data in memory, this takes a quarter of the time of `TarFile.addfile`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def add(self, name: str, data: bytes) -> Entry:
        """Append a file; its name is short and ASCII."""
        start = self.size
        self._write(_header(name, len(data)))
        self._write(data)
        self._write(bytes(-len(data) % BLOCK_BYTES))
        return Entry(name, start, start + BLOCK_BYTES, len(data))

    def finish(self) -> None:
        """Append the end mark, and fill the last record."""
        self._write(bytes(2 * BLOCK_BYTES))
        self._write(bytes(-self.size % tarfile.RECORDSIZE))

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)


def _header(name: str, size: int) -> bytes:
    """The header of a file in the format USTAR."""
    header = bytearray(_EMPTY_HEADER)
    header[: len(name)] = name.encode("ascii")
    header[124:136] = b"%011o\0" % size
    header[148:156] = b" " * 8  # the checksum counts itself as spaces
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _read_members(plan: Plan) -> Iterator[tuple[Member, bytes]]:
    """The members in their order with their bytes; DataError if one has changed."""
    of_block: dict[int, dict[int, Member]] = {}
    for member in plan.members:  # in the order of their blocks
        of_block.setdefault(member.block, {})[member.number] = member
    for number, members in of_block.items():
        places = {at: (member.position, member.bytes) for at, member in members.items()}
        found = 0
        try:
            for at, data in plan.blocks[number].chosen(places):
                if hashlib.sha256(data).hexdigest() != members[at].sha256:
                    raise BadImageError("changed", "its bytes are other ones")
                found += 1
                yield members[at], data
        except BadImageError as error:
            raise _changed(members, error.detail) from None
        if found < len(members):
            raise _changed(members, "an image is missing")


def _changed(members: dict[int, Member], detail: str) -> DataError:
    names = next(iter(members.values())).json
    return DataError(
        f"--input_dir has changed since it was checked ({detail}, at or after {names[:200]}): give a new "
        "folder"
    )
