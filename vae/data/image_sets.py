"""Sets of images before they are used: which are excluded, usable, or in two sets."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vae.data.dataset import CropDataset, Rejection
from vae.data.exclude_list import Excluded, ExcludeList, read_exclude_list, refuse_unmatched
from vae.data.image_files import ImageSet
from vae.progress import track
from vae.system import console
from vae.system.errors import DataError
from vae.system.host import usable_cores

# ---- Excluded images ---------------------------------------------------------------------------------------


def find_listed(images: ImageSet, listed: ExcludeList) -> np.ndarray:
    """The indices of the images that a list names, sorted."""
    return images.find(listed.names, listed.keys)


def find_excluded(
    path: str,
    sets: Mapping[str, tuple[ImageSet, Sequence[int]]],
    find: Callable[[ImageSet, ExcludeList], np.ndarray] = find_listed,
) -> list[Excluded]:
    """The images that the list of --exclude names, of each set among those at the given indices.

    `sets` have names for messages. UserError if the list names no image of them, DataError if a set has no
    other images.
    """
    listed = read_exclude_list(path)
    indices_of = {name: find(images, listed) for name, (images, _) in sets.items()}
    if not any(map(len, indices_of.values())):
        refuse_unmatched(listed)
    for name, (images, used) in sets.items():
        if len(used) < len(images):
            indices_of[name] = np.intersect1d(indices_of[name], used)
        if len(used) and len(indices_of[name]) == len(used):
            raise DataError(f"--exclude {path} has all {len(used)} {name} images: leave some of them out")
    counts = " and ".join(f"{len(indices)} {name}" for name, indices in indices_of.items())
    console.info(f"exclude {counts} images are left out")
    return [Excluded(indices, listed.sha256) for indices in indices_of.values()]


# ---- A test of the images ----------------------------------------------------------------------------------

COMPLETE = 500  # images: decoding that many takes seconds; of larger sets, a sample is tested
SAMPLE = 16
MAX_THREADS = 8  # decoding releases the GIL; each thread holds one decoded image in memory


def accepted_bad_images(max_bad_fraction: float, total: int) -> int:
    """The number of `total` training images that may be unusable; at least one, unless the fraction is 0."""
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

MAX_FILES = 100_000  # files of a folder whose sizes are compared: 12 s on a share that takes 1 ms for each
MAX_ROWS = 2_000_000  # rows of indexes that are compared: reading more takes minutes
MAX_BYTES = 8 * 2**30  # maximum that is hashed: BMP and TIFF files of one camera have one size

Pairs = list[tuple[int, int]]  # indices of an image: in the validation set, and in the training set


class NotComparedError(Exception):
    """Comparing the images would take minutes; the message says why."""


def find_shared_images(
    train: ImageSet, validation: ImageSet, exclude: ExcludeList | None
) -> list[tuple[str, str]]:
    """Names of images of both sets, in the validation set and in the training set, if training uses them.

    If folders have files in common, those alone. NotComparedError if the sets are too large.
    """
    pairs = _in_same_folders(train, validation) or _with_same_bytes(train, validation)
    if exclude is not None and pairs:
        excluded = set(find_listed(train, exclude).tolist())
        pairs = [pair for pair in pairs if pair[1] not in excluded]
    return [(validation.name(ours), train.name(theirs)) for ours, theirs in pairs]


def _in_same_folders(train: ImageSet, validation: ImageSet) -> Pairs:
    """Files in folders that both sets have, by whatever path: links, and on Windows letters of other case."""
    index_of = {path: index for index, path in enumerate(train.paths())}
    pairs = ((ours, index_of.get(path)) for ours, path in enumerate(validation.paths()))
    return [(ours, theirs) for ours, theirs in pairs if theirs is not None]


def _with_same_bytes(train: ImageSet, validation: ImageSet) -> Pairs:
    """Images with the same SHA-256. Only files of the same size are hashed."""
    for images in (validation, train):
        if len(images) > (MAX_ROWS if images.has_index else MAX_FILES):
            raise NotComparedError(f"{images.location} has {len(images)} images")
    sizes = [validation.file_sizes(), train.file_sizes()]
    common = np.setdiff1d(np.intersect1d(sizes[0], sizes[1]), [0])
    ours, theirs = (np.flatnonzero(np.isin(of_set, common)) for of_set in sizes)
    files = ((validation, sizes[0][ours]), (train, sizes[1][theirs]))
    read = sum(int(of_set.sum()) for images, of_set in files if not images.has_index)
    if read > MAX_BYTES:
        raise NotComparedError(f"{read / 2**30:.0f} GiB of files have equal sizes")
    keys, left, right = np.intersect1d(validation.keys(ours), train.keys(theirs), return_indices=True)
    pairs = zip(ours[left[keys != b""]].tolist(), theirs[right[keys != b""]].tolist(), strict=True)
    return sorted(pairs)
