"""Which validation images are training images too: the same files, or files with the same bytes."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from vae.data.dataset import FolderImages
from vae.data.exclude_list import KEY_DIGITS, ExcludeList
from vae.data.excluding import find_excluded
from vae.progress import track
from vae.shards.shard_images import ShardImages
from vae.system.files import sha256_of_file

THREADS = 8  # reading and hashing release the GIL
MAX_FILES = 100_000  # of a folder whose sizes are compared: 12 s on a share that takes 1 ms for each
MAX_BYTES = 8 * 2**30  # that are hashed: BMP and TIFF files of one camera have one size

Set = FolderImages | ShardImages
Pairs = list[tuple[int, int]]  # indices of an image: in the validation set, and in the training set


class NotComparedError(Exception):
    """Comparing the images would take minutes; the message says why."""


def find_shared_images(train: Set, validation: Set, exclude: ExcludeList | None) -> list[tuple[str, str]]:
    """Names of images of both sets, in the validation set and in the training set, if training uses them.

    If folders have files in common, those alone. NotComparedError if the sets are too large.
    """
    pairs: Pairs = []
    if isinstance(train, FolderImages) and isinstance(validation, FolderImages):
        pairs = _in_same_folders(train, validation)
    pairs = pairs or _with_same_bytes(train, validation)
    if exclude is not None and pairs:
        indices = np.array([index for _, index in pairs])
        if isinstance(train, FolderImages):  # those alone are hashed
            few = FolderImages(train.root, [train.names[index] for index in indices])
            excluded = indices[find_excluded(few, exclude)]
        else:
            excluded = find_excluded(train, exclude)
        pairs = [pair for pair in pairs if pair[1] not in excluded]
    return [(validation.name(ours), train.name(theirs)) for ours, theirs in pairs]


def _in_same_folders(train: FolderImages, validation: FolderImages) -> Pairs:
    """Files in folders that both sets have, by whatever path: links, and on Windows letters of other case."""
    places = {place: index for index, place in enumerate(_places(train)) if place[0]}
    found = ((ours, places.get(place)) for ours, place in enumerate(_places(validation)))
    return [(ours, theirs) for ours, theirs in found if theirs is not None]


def _places(images: FolderImages) -> Iterator[tuple[tuple[int, int] | None, str]]:
    """The device and inode of each image's folder, and the name of its file."""
    folders: dict[str, tuple[int, int] | None] = {}
    for name in images.names:
        folder, file = os.path.split(name)
        if folder not in folders:
            folders[folder] = None
            with suppress(OSError):
                status = os.stat(os.path.join(images.root, folder))
                folders[folder] = (status.st_dev, status.st_ino)
        yield folders[folder], file


def _with_same_bytes(train: Set, validation: Set) -> Pairs:
    """Images with the same SHA-256. Only files of the same size are hashed."""
    sizes = [_sizes(validation), _sizes(train)]
    common = np.setdiff1d(np.intersect1d(sizes[0], sizes[1]), [0])
    ours, theirs = (np.flatnonzero(np.isin(of_set, common)) for of_set in sizes)
    files = ((validation, sizes[0][ours]), (train, sizes[1][theirs]))
    read = sum(int(of_set.sum()) for images, of_set in files if isinstance(images, FolderImages))
    if read > MAX_BYTES:
        raise NotComparedError(f"{read / 2**30:.0f} GiB of files have equal sizes")
    keys, left, right = np.intersect1d(_keys(validation, ours), _keys(train, theirs), return_indices=True)
    pairs = zip(ours[left[keys != b""]].tolist(), theirs[right[keys != b""]].tolist(), strict=True)
    return sorted(pairs)


def _sizes(images: Set) -> np.ndarray:
    """The size of each image in bytes; 0 for a file that cannot be read."""
    if isinstance(images, ShardImages):
        return np.concatenate([rows["size"] for rows in images.indexes()])
    if len(images) > MAX_FILES:
        raise NotComparedError(f"{images.location} has {len(images)} images")
    with ThreadPoolExecutor(THREADS) as threads:
        return np.fromiter(threads.map(_size, _paths(images, range(len(images)))), np.int64, len(images))


def _keys(images: Set, indices: np.ndarray) -> np.ndarray:
    """The first half of the SHA-256 of images; empty for a file that cannot be read."""
    if isinstance(images, ShardImages):
        return np.concatenate([rows["key"] for rows in images.indexes()])[indices]
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(_digest, _paths(images, indices.tolist()))
        hashed = list(track(digests, "comparing --val_path", len(indices), "image", keep=False))
    return np.array(hashed, f"S{KEY_DIGITS}")


def _paths(images: FolderImages, indices: Sequence[int]) -> list[str]:
    return [os.path.join(images.root, images.names[index]) for index in indices]


def _size(path: str) -> int:
    with suppress(OSError):  # training names it
        return os.stat(path).st_size
    return 0


def _digest(path: str) -> bytes:
    with suppress(OSError):
        return sha256_of_file(path)[:KEY_DIGITS].encode()
    return b""
