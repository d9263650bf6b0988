"""One shard of a dataset, and its index: where each image file is within the tar file.

The index of x.tar is x.npy: one row for each image, in the order of the tar file.
"""

import hashlib
import io
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vae.images.formats import BadImageError
from vae.system.files import read_regular

MAX_NAME_BYTES = 256  # of an image's name in a tar file
# key: the first 32 digits of the SHA-256 of the image file; offset: of its first byte within the tar file;
# phash_low, phash_high: of vae/prepare/near_duplicates.py, to find images that look alike, or 0;
# text_start, text_end: the part of the tar file with the TEXTS of an image, which may be around it, or 0.
_COLUMNS = [
    ("key", "S32"),
    ("offset", "<i8"),
    ("size", "<i8"),
    ("crc32", "<u4"),
    ("width", "<u4"),
    ("height", "<u4"),
    ("phash_low", "<u8"),
    ("phash_high", "<u8"),
    ("text_start", "<i8"),
    ("text_end", "<i8"),
]


class Shard(NamedTuple):
    """One shard of a dataset."""

    name: str  # file name, below the folder of the tar files
    samples: int  # that the index has
    bytes: int
    sha256: str
    index_sha256: str


def index_type(name_bytes: int) -> np.dtype:
    """A row of an index with names of images of at most so many bytes.

    A name is that of the member if others wrote the tar file, else the key.
    """
    return np.dtype([*_COLUMNS, ("name", f"S{name_bytes}")])


def index_path(folder: Path, name: str) -> Path:
    """The index of the shard with this name."""
    return folder / f"{name.removesuffix('.tar')}.npy"


def max_index_bytes(shard: Shard) -> int:
    """The largest index of a shard with so many images."""
    return 4096 + shard.samples * index_type(MAX_NAME_BYTES).itemsize


def read_index(path: Path, shard: Shard) -> np.ndarray:
    """The index of a shard: index_type (n,). BadImageError if it is another one."""
    try:
        return parse_index(read_regular(path, max_index_bytes(shard)), shard)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadImageError("bad_index", f"{path.name} cannot be read ({reason})") from error


def parse_index(data: bytes, shard: Shard) -> np.ndarray:
    """The index of a shard from the content of its file; errors as `read_index`."""
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        name = index_path(Path(), shard.name).name
        raise BadImageError("bad_index", f"{name} is not the index that the dataset lists")
    return np.load(io.BytesIO(data))


class Row(NamedTuple):
    """A row of an index: where an image file is."""

    key: bytes
    offset: int
    size: int
    crc32: int
    width: int
    height: int


def row_name(row: np.void) -> str:
    """The name of an image within its tar file."""
    name: bytes = row["name"]
    return name.decode("utf-8", "replace")


def check_bytes(data: bytes, row: Row) -> bytes:
    """The bytes of an image file; BadImageError if they are not those that its row describes."""
    if len(data) < row.size:
        raise BadImageError("truncated", "the shard ends within it")
    if zlib.crc32(data) != row.crc32:
        raise BadImageError("checksum", "its bytes are not those that were written")
    return data
