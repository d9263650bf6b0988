"""Sets of images before training: which are excluded, usable, or in two sets, and how large they are."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import numpy as np

from vae.data.dataset import CropDataset, FolderImages, Images, Rejection
from vae.data.exclude_list import KEY_DIGITS, ExcludeList
from vae.data.manifest import read_rows
from vae.images.decoding import upright_size
from vae.images.formats import BadImageError
from vae.progress import track
from vae.shards.dataset_json import row_name
from vae.shards.shard_images import ShardImages
from vae.system import console
from vae.system.errors import DataError
from vae.system.files import sha256_of_file
from vae.system.host import usable_cores

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
    yield own[keys.contains(_hashes(images, own, "hashing for --exclude"))]


def _hashes(images: FolderImages, indices: np.ndarray, title: str) -> np.ndarray:
    """The first half of the SHA-256 of image files; empty for one that cannot be read."""

    def digest(index: int) -> bytes:
        with suppress(OSError):  # training names it
            return sha256_of_file(os.path.join(images.root, images.names[index]))[:KEY_DIGITS].encode()
        return b""

    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(digest, indices.tolist())
        hashed = list(track(digests, title, len(indices), "image", keep=False))
    return np.array(hashed, f"S{KEY_DIGITS}")


# ---- A test of the images ----------------------------------------------------------------------------------

COMPLETE = 500  # images: decoding that many takes seconds; of larger sets, a sample is tested
SAMPLE = 16
MAX_THREADS = 8  # decoding releases the GIL; each thread holds one decoded image in memory


def accepted_bad_images(max_bad_fraction: float, total: int) -> int:
    """How many of `total` training images may be unusable; at least one, unless the fraction is 0."""
    return max(1, int(max_bad_fraction * total)) if max_bad_fraction else 0


def probe(
    dataset: CropDataset, max_bad_fraction: float, sample: Sequence[int] | None = None
) -> list[Rejection]:
    """Decode a `sample`; default: all images of a small set, or some of a larger one. Return the rejections.

    Raises DataError, one line with the reasons, an example and a remedy, if no image can be used, or if more
    of a small set are unusable than `max_bad_fraction` accepts. Prints a warning about fewer.
    """
    total = len(dataset)
    if sample is None:
        count = total if total <= COMPLETE else SAMPLE
        sample = np.unique(np.linspace(0, total - 1, count).round().astype(int)).tolist()
    count = len(sample)
    rejected = _try_images(dataset, sample)
    if not rejected:
        return []
    if len(rejected) == count:
        raise DataError(
            f"--data_path {dataset.images.location}: none of the {count} images that were tried can be used "
            f"({_reasons(rejected)})"
        )
    accepted = accepted_bad_images(max_bad_fraction, total)
    if count == total and len(rejected) > accepted:
        raise DataError(
            f"--data_path {dataset.images.location}: {len(rejected)} of {total} training images cannot be "
            f"used, more than the {accepted} of --max_bad_fraction {max_bad_fraction} "
            f"({_reasons(rejected)}): remove them, or raise --max_bad_fraction"
        )
    console.warning(
        f"{len(rejected)} of {count} training images that were checked cannot be used, and training skips "
        f"them: {rejected[0]}{', ...' if len(rejected) > 1 else ''}"
    )
    return rejected


def _try_images(dataset: CropDataset, indices: Sequence[int]) -> list[Rejection]:
    """The rejected images among these."""
    with ThreadPoolExecutor(min(MAX_THREADS, usable_cores())) as threads:
        attempts = threads.map(lambda index: dataset[0, index].rejection, indices)
        results = track(attempts, "checking images", len(indices), "image", keep=False)
        return [rejection for rejection in results if rejection is not None]


def _reasons(rejected: list[Rejection]) -> str:
    """The reasons with their counts, an example of the most common one, and the command with remedies."""
    reasons = Counter(rejection.reason for rejection in rejected).most_common()
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    example = next(rejection for rejection in rejected if rejection.reason == reasons[0][0])
    return f"{counts}; for example {example}; prepare_data.py --mode validate names a remedy for each reason"


# ---- Images of both sets -----------------------------------------------------------------------------------

MAX_FILES = 100_000  # of a folder whose sizes are compared: 12 s on a share that takes 1 ms for each
MAX_ROWS = 2_000_000  # of the indexes of shards that are compared, whose reading takes minutes
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
    places = {place: index for index, place in enumerate(_real_paths(train))}
    found = ((ours, places.get(place)) for ours, place in enumerate(_real_paths(validation)))
    return [(ours, theirs) for ours, theirs in found if theirs is not None]


def _real_paths(images: FolderImages) -> Iterator[tuple[str, str]]:
    """The real path of each image's folder, and the name of its file."""
    real = cache(lambda folder: os.path.normcase(os.path.realpath(os.path.join(images.root, folder))))
    for name in images.names:
        folder, file = os.path.split(name)
        yield real(folder), os.path.normcase(file)


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
    if len(images) > (MAX_ROWS if isinstance(images, ShardImages) else MAX_FILES):
        raise NotComparedError(f"{images.location} has {len(images)} images")
    if isinstance(images, ShardImages):
        return np.concatenate([rows["size"] for rows in images.indexes()])

    def size(name: str) -> int:
        with suppress(OSError):  # training names it
            return os.path.getsize(os.path.join(images.root, name))
        return 0

    with ThreadPoolExecutor(THREADS) as threads:
        return np.fromiter(threads.map(size, images.names), np.int64, len(images))


def _keys(images: Set, indices: np.ndarray) -> np.ndarray:
    """The first half of the SHA-256 of images; empty for a file that cannot be read."""
    if isinstance(images, ShardImages):
        return np.concatenate([rows["key"] for rows in images.indexes()])[indices]
    return _hashes(images, indices, "comparing --val_path")


# ---- Sizes of images ---------------------------------------------------------------------------------------

SIZE_THREADS = 16  # headers are small: the time is that of a disk or a network share


def image_sizes(images: FolderImages, indices: np.ndarray) -> np.ndarray:
    """Width and height of the images at `indices`: int64 (n, 2); 0 if unknown."""

    def size(index: int) -> tuple[int, int]:
        try:
            return upright_size(os.path.join(images.root, images.names[index]))
        except (BadImageError, OSError):  # training names it when it is its turn
            return 0, 0

    with ThreadPoolExecutor(SIZE_THREADS) as threads:
        sizes = track(threads.map(size, indices.tolist()), "reading sizes", len(indices), "image", keep=False)
        return np.array(list(sizes), dtype=np.int64).reshape(-1, 2)
