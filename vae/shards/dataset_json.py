"""A dataset of shards: WebDataset tar files, an index of each, a table of them, and a `dataset.json`.

`dataset.json` has `format`, `version` (the SHA-256 of the table), `policy` (the rules by which images were
accepted) and `validation` (the file name of the dataset of validation images, or null). The table is
`dataset.npy` beside it, with a row for each shard.

Tar files that others wrote are not beside `dataset.json`: it has `tars`, their folder or address, and
`indexes`, the folder beside it with the indexes. Images without a row there are left out. `tars` does not
count for the version, so these tar files may be moved.
"""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vae.images.formats import BadImageError
from vae.shards.store import StoreFile, read_file
from vae.system.addresses import address_problem, is_remote
from vae.system.errors import DataError, UserError
from vae.system.files import decode_text, replace_bytes, write_json

MAX_NAME_BYTES = 256  # maximum length of an image's name in a tar file
# key: the first 32 digits of the SHA-256 of the image file; offset: of its first byte within the tar file;
# text_start, text_end: the part of the tar file with the TEXTS of an image, which may be around it, or 0.
_COLUMNS = [
    ("key", "S32"),
    ("offset", "<i8"),
    ("size", "<i8"),
    ("crc32", "<u4"),
    ("width", "<u4"),
    ("height", "<u4"),
    ("text_start", "<i8"),
    ("text_end", "<i8"),
]


class Shard(NamedTuple):
    """One shard of a dataset."""

    name: str  # file name, below the folder of the tar files
    samples: int  # images in the index
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
        data = path.read_bytes()
    except OSError as error:
        raise BadImageError("bad_index", f"{path.name} cannot be read ({error.strerror})") from error
    return check_index(data, shard)


def check_index(data: bytes, shard: Shard) -> np.ndarray:
    """The content of the index of a shard: index_type (n,). BadImageError if it is another one."""
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


def read_part(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file; fewer at its end. Opening it takes microseconds, and threads share no position."""
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def check_bytes(data: bytes, row: Row) -> bytes:
    """The bytes of an image file; BadImageError if they are not those that its row describes."""
    if len(data) < row.size:
        raise BadImageError("truncated", "the shard ends within it")
    if zlib.crc32(data) != row.crc32:
        raise BadImageError("checksum", "its bytes are not those that were written")
    return data


FORMAT = 5
_TABLE_COLUMNS = [("samples", "<i8"), ("bytes", "<i8"), ("sha256", "u1", 32), ("index_sha256", "u1", 32)]


class Shards(Sequence[Shard]):
    """The shards of a dataset as columns: 1.4 million need 0.1 GiB, and would need 0.7 GiB as objects."""

    def __init__(self, table: np.ndarray) -> None:
        self._table = table
        self.names: np.ndarray = table["name"]  # as bytes
        self.samples: np.ndarray = np.ascontiguousarray(table["samples"])
        self.bytes: np.ndarray = np.ascontiguousarray(table["bytes"])

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Shard:  # type: ignore[override]
        row = self._table[number]
        hashes = (row[name].tobytes().hex() for name in ("sha256", "index_sha256"))
        name = row["name"].decode("utf-8", "surrogateescape")
        return Shard(name, int(row["samples"]), int(row["bytes"]), *hashes)


def table_of(shards: Sequence[Shard]) -> np.ndarray:
    """The table of a dataset; the same shards have the same table everywhere."""
    names = [shard.name.encode("utf-8", "surrogateescape") for shard in shards]
    table = np.empty(len(shards), [("name", f"S{max(map(len, names))}"), *_TABLE_COLUMNS])
    table["name"] = names
    for column in ("samples", "bytes"):
        table[column] = [getattr(shard, column) for shard in shards]
    for column in ("sha256", "index_sha256"):
        digests = b"".join(bytes.fromhex(getattr(shard, column)) for shard in shards)
        table[column] = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    return table


class ShardedDataset(NamedTuple):
    """The content of a `dataset.json` and of its table."""

    path: Path | StoreFile
    shards: Shards
    policy: dict[str, Any]
    validation: str | None
    version: str
    tars: str | None = None  # folder or address of tar files that others wrote; None: that of dataset.json
    indexes: str = ""  # folder of the indexes, beside dataset.json
    flag: str = "--data_path"  # given by the user, for messages

    @property
    def samples(self) -> int:
        """Number of images."""
        return int(self.shards.samples.sum())

    @property
    def store(self) -> StoreFile | None:
        """A file beside the shards, if they are on a remote store."""
        if self.tars is not None:
            return StoreFile(f"{self.tars}/", self.flag) if is_remote(self.tars) else None
        return self.path if isinstance(self.path, StoreFile) else None

    @property
    def folder(self) -> Path:
        """The folder with the shards; DataError if it is on a remote store."""
        if self.store is not None or isinstance(self.path, StoreFile):
            raise DataError(
                f"{self.flag} {self.path} is on a remote store: copy the dataset to this machine, or "
                "run the command where it is"
            )
        return self.path.parent / (self.tars or "")

    @property
    def index_folder(self) -> Path:
        """The folder with the indexes of a dataset on this machine."""
        assert isinstance(self.path, Path)
        return self.path.parent / self.indexes

    def shard_file(self, shard: Shard) -> Path | StoreFile:
        """The tar file of a shard."""
        return self.store.sibling(shard.name) if self.store else self.folder / shard.name

    def index_file(self, shard: Shard) -> Path | StoreFile:
        """The index of a shard."""
        return self.beside(index_path(Path(self.indexes), shard.name).as_posix())

    def beside(self, name: str) -> Path | StoreFile:
        """A file in the folder of `dataset.json`."""
        return _beside(self.path, name)


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a dataset of shards, and not a manifest or a folder of images."""
    return is_remote(path) or (os.fspath(path).lower().endswith(".json") and not os.path.isdir(path))


def write_dataset(
    path: Path,
    shards: Sequence[Shard],
    policy: Mapping[str, Any],
    validation: str | None,
    *,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the table of a dataset, then its `dataset.json`. `more`: `tars` with `indexes`, or nothing."""
    file = io.BytesIO()
    np.save(file, table_of(shards))
    replace_bytes(path.with_suffix(".npy"), file.getvalue())
    content = {
        "format": FORMAT,
        "version": hashlib.sha256(file.getvalue()).hexdigest(),
        "policy": dict(policy),
        **(more or {}),
        "validation": validation,
    }
    write_json(path, content, indent=1)


def read_dataset(path: str | os.PathLike[str] | StoreFile, *, flag: str = "--data_path") -> ShardedDataset:
    """Read a dataset; DataError, with `flag`, if it is missing, of another version or damaged."""
    if not isinstance(path, StoreFile):
        if problem := address_problem(path):
            raise UserError(f"{flag} {path} {problem}")
        path = StoreFile(os.fspath(path), flag) if is_remote(path) else Path(path)
    if not path.name.lower().endswith(".json"):
        raise DataError(f"{flag} {path} is not a dataset of shards: give the address of its dataset.json")
    try:
        content = json.loads(decode_text(_read(path), errors="strict"))
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("prepare_data.py --mode shard writes one")
        if content["format"] == FORMAT:
            return _parsed(path, flag, content)
    except FileNotFoundError as error:
        if error.filename not in (None, str(path)):
            raise DataError(f"{flag} {path}: {error.filename} is missing: copy all of the dataset") from None
        raise DataError(f"{flag} {path} does not exist: prepare_data.py --mode shard writes one") from None
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UserError:  # of the store
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{flag} {path} is not a dataset of shards, or is damaged: {error}") from error
    raise DataError(
        f"{flag} {path} has format {content['format']}, but this program reads {FORMAT}: write it again with "
        "prepare_data.py"
    )


def _parsed(path: Path | StoreFile, flag: str, content: dict[str, Any]) -> ShardedDataset:
    """The dataset with this content, and its table; KeyError, TypeError or ValueError if it is damaged."""
    tars = content.get("tars")
    if tars is not None and (problem := address_problem(tars)):
        raise UserError(f"{flag} {path}: its tars {problem}")
    table_path = _beside(path, str(PurePosixPath(path.name).with_suffix(".npy")))
    data = _read(table_path)
    if hashlib.sha256(data).hexdigest() != content["version"]:
        raise ValueError(f"{table_path.name} is another table than it lists: copy both again")
    return ShardedDataset(
        path,
        Shards(np.load(io.BytesIO(data))),
        dict(content["policy"]),
        content["validation"],
        content["version"],
        tars,
        content.get("indexes", ""),
        flag,
    )


def _beside(path: Path | StoreFile, name: str) -> Path | StoreFile:
    return path.sibling(name) if isinstance(path, StoreFile) else path.parent / name


def _read(file: Path | StoreFile) -> bytes:
    return file.read_bytes() if isinstance(file, Path) else read_file(file)
