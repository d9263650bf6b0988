"""One shard of a dataset, and its index: where each image file is within the tar file.

The index of x.tar is x.npy: one row of INDEX for each image, in the order of the tar file. Those of tar files
that others wrote have more columns: `foreign_index`.
"""

import hashlib
import io
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vae.images.formats import MAX_IMAGE_BYTES, BadImageError
from vae.system.files import read_regular

MAX_NAME_BYTES = 256  # of an image's name in a tar file that others wrote
_INDEX_HEADER_BYTES = 4096  # at most
# key: the first 32 digits of the SHA-256 of the image file; offset: of its first byte within the tar file;
# phash_low, phash_high: of vae/prepare/near_duplicates.py, to find images that look alike.
INDEX = np.dtype(
    [
        ("key", "S32"),
        ("offset", "<i8"),
        ("size", "<i8"),
        ("crc32", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("phash_low", "<u8"),
        ("phash_high", "<u8"),
    ]
)


class Shard(NamedTuple):
    """One shard of a dataset."""

    name: str  # file name, in the folder of the tar files
    samples: int  # in the tar file
    bytes: int
    sha256: str
    index_sha256: str | None = None  # of its index; None in a dataset of format 1


def foreign_index(name_bytes: int) -> np.dtype:
    """The index of a tar file that others wrote, with names of images of at most so many bytes.

    text_start, text_end: the part of the tar file with the TEXTS of an image, which may be around it; or 0.
    """
    more = [("text_start", "<i8"), ("text_end", "<i8"), ("name", f"S{name_bytes}")]
    return np.dtype([*INDEX.descr, *more])


def _is_index(dtype: np.dtype) -> bool:
    if not dtype.names or dtype.names[-1] != "name":
        return dtype == INDEX
    return dtype["name"].itemsize <= MAX_NAME_BYTES and dtype == foreign_index(dtype["name"].itemsize)


def index_path(folder: Path, shard: Shard) -> Path:
    """The index of a shard."""
    return folder / f"{shard.name.removesuffix('.tar')}.npy"


def max_index_bytes(shard: Shard) -> int:
    """The largest index that describes a shard."""
    return _INDEX_HEADER_BYTES + shard.samples * foreign_index(MAX_NAME_BYTES).itemsize


def read_index(path: Path, shard: Shard) -> np.ndarray:
    """The index of a shard: INDEX (n,). BadImageError if it is of another shard."""
    try:
        return parse_index(read_regular(path, max_index_bytes(shard)), shard)
    except ValueError as error:  # too large
        rows = f"{path.name} does not have {shard.samples} rows of an index"
        raise BadImageError("bad_index", rows) from error
    except OSError as error:
        raise BadImageError("bad_index", f"{path.name} cannot be read ({error.strerror})") from error


def parse_index(data: bytes, shard: Shard) -> np.ndarray:
    """The index of a shard from the content of its file; errors as `read_index`."""
    name = index_path(Path(), shard).name
    file = io.BytesIO(data)
    if shard.index_sha256 not in (None, hashlib.sha256(data).hexdigest()):
        raise BadImageError("bad_index", f"{name} is not the index that dataset.json lists")
    try:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # damage in the header raises many types
        raise BadImageError("bad_index", f"{name} cannot be read ({' '.join(str(error).split())})") from error
    rest = len(data) - file.tell()  # no rows are allocated that the file does not have
    if not _is_index(dtype) or shape != (shard.samples,) or rest != shard.samples * dtype.itemsize:
        raise BadImageError("bad_index", f"{name} does not have {shard.samples} rows of an index")
    rows = np.frombuffer(data, dtype, offset=file.tell())
    inside = (rows["offset"] >= 0) & (rows["size"] > 0) & (rows["size"] <= MAX_IMAGE_BYTES)
    inside &= rows["offset"] <= shard.bytes - rows["size"]
    if not inside.all():
        raise BadImageError("bad_index", f"{name} points outside of {shard.name}")
    keys = np.sort(rows["key"])
    if (keys[1:] == keys[:-1]).any():
        raise BadImageError("bad_index", f"{name} has two images of one key")
    return rows


class Row(NamedTuple):
    """A row of an index: where an image file is."""

    key: bytes
    offset: int
    size: int
    crc32: int
    width: int
    height: int


def row_name(row: np.void) -> str:
    """The name of an image within its tar file: that of the member if others wrote it, else its key."""
    name: bytes = row["key"] if row.dtype == INDEX else row["name"]
    return name.decode("utf-8", "replace")


def check_bytes(data: bytes, row: Row) -> bytes:
    """The bytes of an image file; BadImageError if they are not those that its row describes."""
    if len(data) < row.size:
        raise BadImageError("truncated", "the shard ends within it")
    if zlib.crc32(data) != row.crc32:
        raise BadImageError("checksum", "its bytes are not those that were written")
    return data
