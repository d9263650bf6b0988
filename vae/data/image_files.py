"""Sets of images by index. Image files and datasets of shards have the same methods, as ImageSet says."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from vae.data.exclude_list import KEY_DIGITS
from vae.data.manifest import read_rows
from vae.images.decoding import decode_image, upright_size
from vae.images.formats import BadImageError
from vae.progress import track
from vae.sampling.order import Order, ShuffledOrder, by_hash
from vae.shards.shard_images import ShardImages
from vae.system.errors import UserError
from vae.system.files import sha256_of_file

THREADS = 16  # for headers and hashes: the time is that of a disk or a network share


@dataclass(frozen=True)
class FolderImages:
    """The image files `names` below the folder `root`."""

    root: str | os.PathLike[str]
    names: Sequence[str]
    manifest: str | None = None  # which has the keys and labels of the files
    _counts: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    has_index = False  # sizes and keys are read from each file
    cached_bytes = np.empty(0, np.int64)  # sizes of the shards that a cache keeps

    def __len__(self) -> int:
        return len(self.names)

    @property
    def location(self) -> str:
        """The folder."""
        return os.fspath(self.root)

    @property
    def version(self) -> str:
        """SHA-256 of the names: as long as it is the same, a run resumes in the same order."""
        return hashlib.sha256("\n".join(self.names).encode("utf-8", "surrogateescape")).hexdigest()

    def name(self, index: int) -> str:
        """The file's name, relative to the folder."""
        return self.names[index]

    def decode(self, index: int, *, max_pixels: int, background: str, channels: int = 3) -> np.ndarray:
        """The pixels of a file: uint8 (H, W, channels)."""
        path = self._path(index)
        pixels = decode_image(path, max_pixels=max_pixels, background=background, channels=channels)
        with suppress(OSError):
            self._counts["disk_bytes"] += os.stat(path).st_size
        return pixels

    def label(self, index: int) -> str | None:
        """The label of an image in the manifest, for slices of the validation."""
        return self._labels.get(self.names[index])

    def sample(self, count: int) -> np.ndarray:
        """The indices of at most `count` images, chosen by the hashes of their names, in order."""
        if count >= len(self):
            return np.arange(len(self))
        return np.sort(by_hash(name.encode("utf-8", "surrogateescape") for name in self.names)[:count])

    def order(self, seed: int, shuffle_shards: int | None = None) -> ShuffledOrder:
        """All images in each epoch."""
        return ShuffledOrder(len(self.names), seed)

    def expect(self, order: Order, epoch: int, position: int, world_size: int) -> None:
        """Training continues with every world_size-th image from this position on: shards are fetched."""

    def record(self) -> list[str]:
        """The entry of `split.json`: the names."""
        return list(self.names)

    def counts(self) -> dict[str, int]:
        """Bytes that this process has read since the last call: disk_bytes, from the folder or a cache.

        Of shards also remote_bytes, from a store; hits, misses: images whose shard was in the cache, or was
        not.
        """
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def find(self, names: Set[str], keys: np.ndarray, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The indices of images with one of these names, or with one of these keys (S32) in the manifest.

        Of shards, those of this process's share.
        """
        if len(keys) and self.manifest is None:
            raise UserError(
                f"--exclude lists the SHA-256 {keys[0].decode()}, but the files of {self.location} have no "
                "manifest: list their names, or write a manifest or shards with prepare_data.py"
            )
        if len(keys) and self.manifest is not None:
            listed = set(keys.tolist())
            key_of = ((row["path"], row["sha256"][:KEY_DIGITS].lower()) for row in read_rows(self.manifest))
            names = names | {name for name, key in key_of if key.encode("ascii", "replace") in listed}
        return np.flatnonzero([name in names for name in self.names])

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Width and height of images: int64 (n, 2); 0 if unknown, which training reports."""

        def size(index: int) -> tuple[int, int]:
            try:
                return upright_size(self._path(index))
            except (BadImageError, OSError):
                return 0, 0

        return np.array(_in_threads(size, indices, "reading sizes"), dtype=np.int64).reshape(-1, 2)

    def file_sizes(self) -> np.ndarray:
        """The size of each image file in bytes; 0 for one that cannot be read."""

        def size(index: int) -> int:
            with suppress(OSError):
                return os.path.getsize(self._path(index))
            return 0

        return np.array(_in_threads(size, np.arange(len(self)), "reading sizes"), np.int64)

    def keys(self, indices: np.ndarray) -> np.ndarray:
        """The first half of the SHA-256 of image files: S32; empty for one that cannot be read."""

        def key(index: int) -> bytes:
            with suppress(OSError):
                return sha256_of_file(self._path(index))[:KEY_DIGITS].encode()
            return b""

        return np.array(_in_threads(key, indices, "comparing --val_path"), f"S{KEY_DIGITS}")

    def paths(self) -> Iterator[tuple[str, str]]:
        """The real folder and the name of each file, for comparisons; nothing of shards."""
        real = cache(lambda folder: os.path.normcase(os.path.realpath(os.path.join(self.root, folder))))
        for name in self.names:
            folder, file = os.path.split(name)
            yield real(folder), os.path.normcase(file)

    @cached_property
    def _labels(self) -> dict[str, str]:
        """The labels of these files in the manifest, by name."""
        rows = read_rows(self.manifest) if self.manifest is not None else ()
        names = set(self.names)
        labelled = (row for row in rows if row.get("label") is not None and row["path"] in names)
        return {row["path"]: str(row["label"]) for row in labelled}

    def _path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])


def _in_threads(read: Any, indices: np.ndarray, title: str) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as threads:
        results = threads.map(read, indices.tolist())
        return list(track(results, title, len(indices), "image", keep=False))


ImageSet = FolderImages | ShardImages  # mypy checks that both have what is used
