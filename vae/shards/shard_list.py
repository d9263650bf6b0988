"""The shards of a dataset, as many as there are: read from JSON into columns."""

import re
import tarfile
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from vae.shards.index import MAX_NAME_BYTES, Shard

# Only names in the folder, or below that of others: a dataset may come from a stranger.
_TAR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.tar")
_FOREIGN_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._=+@,-]*/)*[A-Za-z0-9_][A-Za-z0-9._=+@,-]*\.tar")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"name", "samples", "bytes", "sha256"}  # of a shard; an older dataset has no index_sha256
MAX_SHARD_BYTES = 2**45
MIN_IMAGE_BYTES = 2 * tarfile.BLOCKSIZE  # in a shard: a header and the file
SHA256_BYTES = 32
IS_SHARD = object()  # in the place of a valid shard that was read from JSON


class Shards(Sequence[Shard]):
    """The shards of a dataset as columns: 1.4 million need 0.1 GiB, and would need 0.7 GiB as objects."""

    def __init__(self, columns: "ShardColumns") -> None:
        self._names = np.array(columns.names, dtype=np.bytes_)
        self.samples = np.array(columns.samples, dtype=np.int64)
        self.bytes = np.array(columns.bytes, dtype=np.int64)
        self._hashes, self._index_hashes = bytes(columns.hashes), bytes(columns.index_hashes)
        self.are_beside = columns.are_beside  # no name has a folder

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Shard:  # type: ignore[override]
        start = SHA256_BYTES * (number if number >= 0 else len(self) + number)
        sha256, index = (h[start : start + SHA256_BYTES].hex() for h in (self._hashes, self._index_hashes))
        name = self._names[number].decode()
        samples = int(self.samples[number])
        return Shard(name, samples, int(self.bytes[number]), sha256, index or None)

    @property
    def hashed_indexes(self) -> int:
        """Shards with the hash of their index."""
        return len(self._index_hashes) // SHA256_BYTES

    def has_twins(self) -> bool:
        """Whether two shards have the same name."""
        names = np.sort(self._names)
        return bool((names[1:] == names[:-1]).any())


class ShardColumns:
    """Takes the shards out of JSON while it is decoded: their objects are never in memory together."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.samples, self.bytes = array("q"), array("q")
        self.hashes, self.index_hashes = bytearray(), bytearray()
        self.are_beside = True

    def take(self, pairs: list[tuple[str, Any]]) -> Any:
        """The object with these pairs, or IS_SHARD for a valid shard."""
        values = dict(pairs)
        if not _is_shard(values):
            return values
        self.names.append(values["name"])
        self.are_beside &= _TAR_NAME.fullmatch(values["name"]) is not None
        self.samples.append(values["samples"])
        self.bytes.append(values["bytes"])
        self.hashes += bytes.fromhex(values["sha256"])
        self.index_hashes += bytes.fromhex(values.get("index_sha256", ""))
        return IS_SHARD


def is_tar_name(name: str) -> bool:
    """Whether a tar file in a folder, or below it, can be a shard."""
    return len(name) <= MAX_NAME_BYTES and _FOREIGN_NAME.fullmatch(name) is not None


def _is_shard(shard: dict[str, Any]) -> bool:
    return (
        shard.keys() - {"index_sha256"} == _FIELDS
        and isinstance(shard["name"], str)
        and is_tar_name(shard["name"])
        and type(shard["samples"]) is type(shard["bytes"]) is int
        and 0 < shard["samples"] <= shard["bytes"] // MIN_IMAGE_BYTES <= MAX_SHARD_BYTES // MIN_IMAGE_BYTES
        and all(
            isinstance(value, str) and _SHA256.fullmatch(value) is not None
            for name, value in shard.items()
            if name.endswith("sha256")
        )
    )
