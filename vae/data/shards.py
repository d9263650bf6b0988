"""A dataset of shards: WebDataset tar files, an index of each, and a `dataset.json` that lists them.

`dataset.json` has `format`, `version` (a hash of the rest), `policy` (the rules by which images were
accepted), `validation` (the file name of the dataset of held-out images, or null) and `shards`, each with
`name`, `samples`, `bytes` and `sha256`. The index of x.tar is x.npy: one row of INDEX for each image, in the
order of the tar file.
"""

import hashlib
import json
import os
import re
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.config.errors import DataError
from vae.data.decoding import decode_bytes
from vae.data.formats import BadImageError
from vae.data.sampling import Order
from vae.data.streams import StreamOrder, count_streams
from vae.files import check_regular, read_json

FORMAT = 1
MAX_IMAGE_BYTES = 2**31 - 2**12  # of one image file: Linux reads no more at once
MAX_DATASET_BYTES = 2**30  # of dataset.json: about five million shards
OPEN_SHARDS = 64  # files that one process keeps open
# key: the first 32 digits of the SHA-256 of the image file; offset: of its first byte within the tar file.
INDEX = np.dtype(
    [
        ("key", "S32"),
        ("offset", "<i8"),
        ("size", "<i8"),
        ("crc32", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
    ]
)
# Only names in the dataset's own folder: a dataset may come from a stranger.
_TAR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.tar")
_JSON_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Shard(NamedTuple):
    """One shard of a dataset."""

    name: str  # file name, in the folder of dataset.json
    samples: int
    bytes: int
    sha256: str


class ShardedDataset(NamedTuple):
    """The content of a `dataset.json`."""

    path: Path
    shards: tuple[Shard, ...]
    policy: dict[str, Any]
    validation: str | None
    version: str

    @property
    def samples(self) -> int:
        """Number of images."""
        return sum(shard.samples for shard in self.shards)


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a dataset of shards, and not a manifest or a folder of images."""
    return os.fspath(path).lower().endswith(".json") and not os.path.isdir(path)


def dataset_content(
    shards: Sequence[Shard], policy: Mapping[str, Any], validation: str | None
) -> dict[str, Any]:
    """The content of `dataset.json`; the same images and rules have the same version everywhere."""
    content = {
        "format": FORMAT,
        "policy": dict(policy),
        "validation": validation,
        "shards": [shard._asdict() for shard in shards],
    }
    return {"version": _version(content), **content}


def _version(content: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in content.items() if k != "version"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_dataset(path: str | os.PathLike[str], *, flag: str = "--data_path") -> ShardedDataset:
    """Read a `dataset.json`; DataError, with `flag`, if it is missing, newer than this program or damaged."""
    path = Path(path)
    try:
        content = read_json(path, most_bytes=MAX_DATASET_BYTES)
    except FileNotFoundError:
        raise DataError(f"{flag} {path} does not exist: prepare_data.py --mode shard writes one") from None
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{flag} {path} is not a dataset of shards: {error}") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise DataError(f"{flag} {path} is not a dataset of shards: prepare_data.py --mode shard writes one")
    if content["format"] > FORMAT:
        raise DataError(
            f"{flag} {path} has format {content['format']}, but this program reads up to {FORMAT}: update it"
        )
    problem = _problem(content)
    if problem:
        raise DataError(
            f"{flag} {path} is damaged ({problem}): write it again with prepare_data.py --mode shard"
        )
    shards = tuple(Shard(**shard) for shard in content["shards"])
    return ShardedDataset(path, shards, content["policy"], content["validation"], content["version"])


def _problem(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a dataset of a known format."""
    shards, validation = content.get("shards"), content.get("validation")
    if not isinstance(shards, list) or not shards or not isinstance(content.get("policy"), dict):
        return "it lacks shards or policy"
    if validation is not None and not (isinstance(validation, str) and _JSON_NAME.fullmatch(validation)):
        return "validation is no file name"
    if not all(map(_is_shard, shards)):
        return f"shard {next(n for n, shard in enumerate(shards) if not _is_shard(shard))} is not valid"
    if len({shard["name"] for shard in shards}) < len(shards):
        return "a shard is listed twice"
    if content.get("version") != _version(content):
        return "its content does not have its version"
    return None


def _is_shard(shard: Any) -> bool:
    return (
        isinstance(shard, dict)
        and set(shard) == set(Shard._fields)
        and isinstance(shard["name"], str)
        and _TAR_NAME.fullmatch(shard["name"]) is not None
        and all(type(shard[name]) is int and shard[name] > 0 for name in ("samples", "bytes"))
        and isinstance(shard["sha256"], str)
        and _SHA256.fullmatch(shard["sha256"]) is not None
    )


def index_path(folder: Path, shard: Shard) -> Path:
    """The index of a shard."""
    return folder / f"{shard.name.removesuffix('.tar')}.npy"


def read_index(folder: Path, shard: Shard) -> np.ndarray:
    """The index of a shard: INDEX (samples,). BadImageError if it does not describe this shard."""
    path = index_path(folder, shard)
    try:
        check_regular(path)
        with open(path, "rb") as file:
            rows = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise BadImageError("bad_index", f"{path.name} cannot be read ({text})") from error
    if rows.dtype != INDEX or rows.shape != (shard.samples,):
        raise BadImageError("bad_index", f"{path.name} does not have {shard.samples} rows of an index")
    inside = (rows["offset"] >= 0) & (rows["size"] > 0) & (rows["size"] <= MAX_IMAGE_BYTES)
    inside &= rows["offset"] <= shard.bytes - rows["size"]
    if not inside.all():
        raise BadImageError("bad_index", f"{path.name} points outside of {shard.name}")
    keys = np.sort(rows["key"])
    if (keys[1:] == keys[:-1]).any():
        raise BadImageError("bad_index", f"{path.name} has two images of one key")
    return rows


class ShardImages:
    """The image files of a dataset by their index, checked by their crc32.

    Opens indexes and tar files when they are needed, and keeps the last OPEN_SHARDS. A copy in another
    process, and a forked process, begin without open files.
    """

    def __init__(self, dataset: ShardedDataset, num_streams: int):
        """`num_streams`: of the order of training (vae.data.streams)."""
        self.dataset = dataset
        self.num_streams = num_streams
        self._begin()

    def _begin(self) -> None:
        self._open: OrderedDict[int, tuple[np.ndarray, _TarFile]] = OrderedDict()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._process = os.getpid()

    def counts(self) -> dict[str, int]:
        """What this process has read since the last call (vae.data.dataset.Images)."""
        counts, self._counts = self._counts, Counter()
        return {**counts, "open_shards": len(self._open)}

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard.samples for shard in self.dataset.shards])

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "num_streams": self.num_streams}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def location(self) -> str:
        """The path of `dataset.json`."""
        return str(self.dataset.path)

    def order(self, seed: int) -> Order:
        """Every sample in each epoch, except fewer than `num_streams`."""
        counts = [shard.samples for shard in self.dataset.shards]
        return StreamOrder(counts, count_streams(len(self), self.num_streams), seed)

    def fingerprint(self) -> str:
        """The version of the dataset and the number of streams."""
        return f"{self.dataset.version} {self.num_streams}"

    def record(self) -> dict[str, Any]:
        """Path, version and size of the dataset."""
        return {"dataset": self.location, "version": self.dataset.version, "samples": len(self)}

    def decode(self, index: int, *, max_pixels: int, background: str) -> np.ndarray:
        """The pixels of an image: uint8 (H, W, 3)."""
        first_frame = bool(self.dataset.policy.get("first_frame"))
        return decode_bytes(
            self.read(index),
            max_pixels=max_pixels,
            background=background,
            first_frame=first_frame,
            is_verified=True,
        )

    def locate(self, index: int) -> tuple[int, int]:
        """The shard of a sample, and its row there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number]) + self.dataset.shards[number].samples

    def name(self, index: int) -> str:
        """A name for messages: shard and key, or shard and row if the index cannot be read."""
        number, row = self.locate(index)
        shard = self.dataset.shards[number].name
        try:
            return f"{shard}/{self.key(index)}"
        except BadImageError:
            return f"{shard}, sample {row}"

    def key(self, index: int) -> str:
        """The key of a sample: equal image files have equal keys. BadImageError if the shard is unusable."""
        number, row = self.locate(index)
        with self._own_lock():
            return self._shard(number)[0]["key"][row].decode("ascii", "replace")

    def read(self, index: int) -> bytes:
        """The bytes of an image file. BadImageError if they cannot be read or differ from those written."""
        number, row = self.locate(index)
        with self._own_lock():
            rows, file = self._shard(number)
        _, offset, size, crc32, _, _ = rows[row].item()
        try:
            data = file.read(offset, size)
        except OSError as error:
            raise BadImageError("unreadable", error.strerror or str(error)) from error
        if len(data) < size:
            raise BadImageError("truncated", "the shard ends within it")
        if zlib.crc32(data) != crc32:
            raise BadImageError("checksum", "its bytes are not those that were written")
        self._counts["disk_bytes"] += size
        return data

    def _own_lock(self) -> threading.Lock:
        """The lock on the files of this process; a forked process drops those of its parent."""
        if self._process != os.getpid():
            self._begin()
        return self._lock

    def _shard(self, number: int) -> tuple[np.ndarray, "_TarFile"]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        folder, shard = self.dataset.path.parent, self.dataset.shards[number]
        rows = read_index(folder, shard)
        try:
            check_regular(folder / shard.name)
            file = _TarFile(os.open(folder / shard.name, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
        except OSError as error:
            raise BadImageError("missing_shard", f"{shard.name}: {error.strerror}") from error
        self._open[number] = rows, file
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return rows, file

    def close(self) -> None:
        """Close all files that no thread is reading."""
        self._open.clear()


class _TarFile:
    """A file that threads read at the same time; it is closed when nothing refers to it."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on; fewer at the end of the file."""
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, size, offset)
        with self._lock:  # Windows has a single position
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.read(self._descriptor, size)


def shared_keys(one: ShardedDataset, other: ShardedDataset) -> list[str]:
    """Keys that two datasets have in common: images with the same bytes. BadImageError for a bad index."""
    found = np.intersect1d(_keys(one), _keys(other))
    return [key.decode("ascii", "replace") for key in found]


def _keys(dataset: ShardedDataset) -> np.ndarray:
    return np.concatenate([read_index(dataset.path.parent, shard)["key"] for shard in dataset.shards])
