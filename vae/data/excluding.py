"""Which images of a set the list of --exclude names."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from vae.data.dataset import FolderImages, Images
from vae.data.exclude_list import KEY_DIGITS, ExcludeList
from vae.data.manifest import read_rows
from vae.images.formats import BadImageError
from vae.progress import track
from vae.shards.index import row_name
from vae.shards.shard_images import ShardImages
from vae.system.files import sha256_of_file

THREADS = 8  # hashing releases the GIL


def find_excluded(
    images: Images, keys: ExcludeList, manifest: str | None = None, rank: int = 0, world_size: int = 1
) -> np.ndarray:
    """The indices of the images that the list names, sorted: with several processes, of this one's share.

    `manifest`: of the files, with their hashes.
    """
    if isinstance(images, ShardImages):
        found = _in_shards(images, keys, rank, world_size)
    else:
        found = _in_files(images, keys, manifest, rank, world_size)
    return np.unique(np.concatenate([np.empty(0, np.int64), *found]))


def _in_shards(images: ShardImages, keys: ExcludeList, rank: int, world_size: int) -> Iterator[np.ndarray]:
    """For names such as 00000.tar/cat.jpg, only the indexes of their shards are read."""
    members: dict[str, set[str]] = {}
    for name in keys.names:
        tar, _, member = name.rpartition(".tar/")
        members.setdefault(f"{tar}.tar", set()).add(member)
    searched = range(rank, images.num_shards, world_size)
    for number in track(searched, "searching --exclude", len(searched), "shard", keep=False):
        dataset, shard = images.shard(number)
        names = (shard.name, f"{dataset.path}: {shard.name}")  # of several datasets, as messages have them
        wanted = set[str]().union(*(members.get(name, set()) for name in names))
        if not (len(keys.hashes) or wanted):
            continue
        with suppress(BadImageError):  # training names the images of a bad index
            rows = images.rows(number)
            is_listed = keys.contains(rows["key"])
            if wanted:
                is_listed |= np.array([row_name(row) in wanted for row in rows])
            yield int(images.firsts[number]) + np.flatnonzero(is_listed)


def _in_files(
    images: FolderImages, keys: ExcludeList, manifest: str | None, rank: int, world_size: int
) -> Iterator[np.ndarray]:
    """By names, and by the hashes of a manifest; without one, files are hashed if needed."""
    yield np.flatnonzero([name in keys.names for name in images.names])
    if not len(keys.hashes):
        return
    if manifest is not None:
        digests = {row["path"]: row["sha256"][:KEY_DIGITS].lower() for row in read_rows(manifest)}
        hashes = [digests.get(name, "").encode("ascii", "replace") for name in images.names]
        yield np.flatnonzero(keys.contains(np.array(hashes, f"S{KEY_DIGITS}")))
        return
    own = np.arange(rank, len(images), world_size)
    paths = [os.path.join(images.root, name) for name in images.names[rank::world_size]]
    with ThreadPoolExecutor(THREADS) as threads:
        digests_of = threads.map(_digest, paths)
        hashed = list(track(digests_of, "hashing for --exclude", len(paths), "image", keep=False))
    yield own[keys.contains(np.array(hashed, f"S{KEY_DIGITS}"))]


def _digest(path: str) -> bytes:
    with suppress(OSError):  # training names it
        return sha256_of_file(path)[:KEY_DIGITS].encode()
    return b""
