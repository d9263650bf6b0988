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

Found = Iterator[tuple[np.ndarray, np.ndarray]]  # indices of images, and the numbers of their keys


def find_excluded(
    images: Images, keys: ExcludeList, manifest: str | None = None, rank: int = 0, world_size: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the images that the list names, and the numbers of their keys: sorted and different.

    `manifest`: of the files. With several processes, those of this one's share.
    """
    indices = [np.empty(0, np.int64)]
    numbers = [np.empty(0, np.int64)]
    if isinstance(images, ShardImages):
        matches = _in_shards(images, keys, rank, world_size)
    else:
        matches = _in_files(images, keys, manifest, rank, world_size)
    for own, matched in matches:
        indices.append(own)
        numbers.append(matched)
    return np.unique(np.concatenate(indices)), np.unique(np.concatenate(numbers))


def _in_shards(images: ShardImages, keys: ExcludeList, rank: int, world_size: int) -> Found:
    """Search shards: for names such as 00000.tar/cat.jpg, only the indexes of their shards are read.

    Other names are urls and sources in the metadata; those of a remote store are not read.
    """
    members: dict[str, dict[str, int]] = {}
    texts: dict[str, int] = {}
    for name, number in keys.names.items():
        tar, point, member = name.partition(".tar/")
        if point:
            members.setdefault(f"{tar}.tar", {})[member] = number
        else:
            texts[name] = number
    firsts = images.firsts
    searched = range(rank, images.num_shards, world_size)
    for number in track(searched, "searching --exclude", len(searched), "shard", keep=False):
        dataset, shard = images.shard(number)
        wanted = members.get(shard.name, {})
        has_texts = texts and dataset.store is None
        if not (len(keys.hashes) or wanted or has_texts):
            continue
        with suppress(BadImageError):  # training names the images of a bad index
            rows = images.rows(number)
            first = int(firsts[number])
            yield _matches(first + np.arange(len(rows)), keys.numbers(rows["key"]))
            for at in range(len(rows)) if wanted or has_texts else ():
                named = [wanted.get(row_name(rows[at]), -1)]
                if has_texts:
                    recorded = _recorded(images, first + at, dataset.tars is not None)
                    named += [texts.get(text, -1) for text in recorded]
                yield _matches(np.full(len(named), first + at), np.array(named))


def _recorded(images: ShardImages, index: int, of_others: bool) -> Iterator[str]:
    """The url of an image, and its source, but for tar files of others: two members may have one name."""
    with suppress(BadImageError):
        metadata = images.metadata(index)
        for column in ("url",) if of_others else ("url", "source"):
            if isinstance(text := metadata.get(column), str):
                yield text


def _in_files(
    images: FolderImages, keys: ExcludeList, manifest: str | None, rank: int, world_size: int
) -> Found:
    """By names, and by hashes, urls and sources of a manifest; without one, files are hashed if needed."""
    named = np.array([keys.names.get(name, -1) for name in images.names], np.int64)
    yield _matches(np.arange(len(named)), named)
    if manifest is not None:
        places = {name: index for index, name in enumerate(images.names)}
        rows = [row for row in read_rows(manifest) if row["path"] in places]
        own = np.array([places[row["path"]] for row in rows], np.int64)
        digests = [row["sha256"][:KEY_DIGITS].lower().encode("ascii", "replace") for row in rows]
        yield _matches(own, keys.numbers(np.array(digests, f"S{KEY_DIGITS}")))
        for column in ("url", "source"):
            texts = (row.get(column) for row in rows)
            numbers = [keys.names.get(text, -1) if isinstance(text, str) else -1 for text in texts]
            yield _matches(own, np.array(numbers, np.int64))
    elif len(keys.hashes):
        own = np.arange(rank, len(images), world_size)
        paths = [os.path.join(images.root, name) for name in images.names[rank::world_size]]
        with ThreadPoolExecutor(THREADS) as threads:
            hashed = track(
                threads.map(_digest, paths), "hashing for --exclude", len(paths), "image", keep=False
            )
            yield _matches(own, keys.numbers(np.array(list(hashed), f"S{KEY_DIGITS}")))


def _digest(path: str) -> bytes:
    with suppress(OSError):  # training names it
        return sha256_of_file(path)[:KEY_DIGITS].encode()
    return b""


def _matches(indices: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return indices[numbers >= 0], numbers[numbers >= 0]
