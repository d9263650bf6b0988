"""One shard: a tar file in the layout of WebDataset, its indexes, and a mark that they are complete."""

import hashlib
import io
import tarfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vae.prepare.shard.engines import SUFFIXES, Entry, indexes
from vae.shards.dataset_json import shard_content
from vae.shards.index import INDEX, Shard, index_path
from vae.system.errors import DataError
from vae.system.files import atomic_path, read_json, sha256_of_file, write_json

HIDDEN = ".prepare"  # folder with marks of complete shards
BLOCK = tarfile.BLOCKSIZE  # bytes: members begin at multiples of it
KEY_DIGITS = 32  # of the SHA-256 of an image file
SHARD_SECONDS = 3600.0  # to write or read one shard, on a slow disk too


class Member(NamedTuple):
    """An image file of a shard, and what its JSON file says about it."""

    path: str
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

    def describe(self) -> str:
        """Its content in the shard."""
        return f"{self.sha256} {self.extension} {self.json}"


class Plan(NamedTuple):
    """A shard that is to be written."""

    name: str  # of the tar file
    members: list[Member]

    def digest(self) -> str:
        """A hash of the content that the shard will have."""
        parts = [member.describe() for member in self.members]
        return hashlib.sha256("\n".join([self.name, *parts]).encode()).hexdigest()


def stored_bytes(*sizes: int) -> int:
    """Bytes in a tar file of members of these sizes: a header each, and whole blocks."""
    return sum(BLOCK + -(-size // BLOCK) * BLOCK for size in sizes)


def write_shard(root: Path, plan: Plan) -> Shard:
    """Write a shard in `root`, unless it has its mark; the same plan gives the same bytes.

    Raises DataError if an image file has changed since it was checked, and OSError if writing fails.
    """
    done = read_mark(root, plan)
    if done is not None and done.index_sha256 is not None:
        return done
    with atomic_path(root / plan.name) as temporary:
        rows, foreign = _write_tar(temporary, plan.members)
        shard = Shard(plan.name, len(rows), temporary.stat().st_size, sha256_of_file(temporary))
    for suffix, content in foreign.items():
        with atomic_path(root / plan.name.replace(".tar", suffix)) as temporary:
            temporary.write_bytes(content)
    with atomic_path(index_path(root, shard)) as temporary, temporary.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    shard = shard._replace(index_sha256=sha256_of_file(index_path(root, shard)))
    write_mark(root, plan.digest(), shard)
    return shard


def write_mark(root: Path, plan: str, shard: Shard) -> None:
    """Note that the shard of a plan with this digest is complete."""
    write_json(_mark(root, shard.name), {"plan": plan, "shard": shard_content(shard)})


def copy_mark(source: Path, root: Path, shard: Shard) -> None:
    """Note that a shard from another folder is complete, if that folder notes it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        write_mark(root, read_json(_mark(source, shard.name))["plan"], shard)


def _mark(root: Path, name: str) -> Path:
    return root / HIDDEN / f"{name}.json"


def read_mark(root: Path, plan: Plan) -> Shard | None:
    """The shard of a plan, if it is complete and has the size that was written."""
    try:
        content = read_json(_mark(root, plan.name))
        shard = Shard(**content["shard"])
        is_complete = (root / shard.name).stat().st_size == shard.bytes and all(
            (root / shard.name.replace(".tar", suffix)).exists() for suffix in (".npy", *SUFFIXES)
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return shard if is_complete and content["plan"] == plan.digest() else None


def _write_tar(path: Path, members: Sequence[Member]) -> tuple[np.ndarray, dict[str, bytes]]:
    """Write a tar file; returns its index, INDEX (N,), and those of other programs by suffix."""
    rows, samples = np.zeros(len(members), INDEX), []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, member in enumerate(members):
            data = _read(member)
            image = _add(tar, f"{member.key}.{member.extension}", data)
            samples.append((image, _add(tar, f"{member.key}.json", member.json.encode())))
            key, crc32 = member.key.encode(), zlib.crc32(data)
            phash = int(member.phash[:16], 16), int(member.phash[16:], 16)
            rows[number] = (key, image.offset, image.size, crc32, *member.size, *phash)
        return rows, indexes(samples, tar.offset)


def _read(member: Member) -> bytes:
    data = Path(member.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != member.sha256:
        raise DataError(f"--input_dir: {member.path} has changed since it was checked: run the command again")
    return data


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> Entry:
    """Add a file without time, owner or other traces of this machine."""
    info, header = tarfile.TarInfo(name), tar.offset
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))
    return Entry(name, header, header + BLOCK, len(data))
