"""A test, before anything expensive starts, whether the images of a folder can be used."""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vae.data.dataset import CropDataset, Rejection
from vae.progress import track
from vae.system import console
from vae.system.errors import DataError
from vae.system.host import usable_cores

COMPLETE = 500  # images: decoding that many takes seconds; of larger sets, a sample is tested
SAMPLE = 16
SLOW_SECONDS = 0.2  # of one core per image: a JPEG file of about 12 megapixels
MAX_THREADS = 8  # decoding releases the GIL; each thread holds one decoded image in memory
REMEDIES = {
    "too_small": "add --upscale or use a smaller --image_size",
    "too_many_pixels": "raise --max_pixels or use smaller images",
    "format_not_supported": "convert them to PNG or JPEG",
    "jpeg_coding_not_supported": "convert them to PNG or 8-bit JPEG",
    "plugin_missing": "install that package, or convert them to PNG or JPEG",
    "float_pixels": "save them as 16-bit",
    "animated": "save single frames",
    "transparent": "use images with visible pixels",
    "unreadable": "fix links and permissions",
    "broken_link": "fix the links",
    "no_permission": "fix the permissions",
}


def accepted_bad_images(max_bad_fraction: float, total: int) -> int:
    """How many of `total` training images may be unusable; at least one, unless the fraction is 0."""
    return max(1, int(max_bad_fraction * total)) if max_bad_fraction else 0


def probe(
    dataset: CropDataset, max_bad_fraction: float, sample: Sequence[int] | None = None
) -> list[Rejection]:
    """Decode a `sample`; default: all images of a small set, or some of a larger one. Return the rejections.

    Raises DataError, one line with the reasons, an example and a remedy, if no image can be used, or if more
    of a small set are unusable than `max_bad_fraction` accepts. Prints a warning about fewer, and a note if
    decoding takes long.
    """
    total = len(dataset)
    if sample is None:
        count = total if total <= COMPLETE else SAMPLE
        sample = np.unique(np.linspace(0, total - 1, count).round().astype(int)).tolist()
    count = len(sample)
    rejected, seconds = _try_images(dataset, sample)
    if seconds > SLOW_SECONDS:
        command = f"prepare_data.py --mode preprocess --target_size {dataset.image_size}"
        console.info(
            f"decoding takes {seconds:.1f} s of one core per image, which may limit training: {command} "
            "makes copies that decode faster"
        )
    if not rejected:
        return []
    if len(rejected) == count:
        raise DataError(
            f"--data_path {dataset.images.location}: none of the {count} images that were tried can be used "
            f"{_reasons(rejected, 'copy the files again or give another folder')}"
        )
    accepted = accepted_bad_images(max_bad_fraction, total)
    if count == total and len(rejected) > accepted:
        raise DataError(
            f"--data_path {dataset.images.location}: {len(rejected)} of {total} training images cannot be "
            f"used, more than the {accepted} of --max_bad_fraction {max_bad_fraction} "
            f"{_reasons(rejected, 'copy the files again or remove them')}; or raise --max_bad_fraction"
        )
    console.warning(
        f"{len(rejected)} of {count} training images that were checked cannot be used, and training skips "
        f"them: {rejected[0]}{', ...' if len(rejected) > 1 else ''}"
    )
    return rejected


def _try_images(dataset: CropDataset, indices: Sequence[int]) -> tuple[list[Rejection], float]:
    """The rejected images among these, and the mean seconds of one core."""

    def attempt(index: int) -> tuple[Rejection | None, float]:
        began = time.thread_time()
        return dataset[0, index].rejection, time.thread_time() - began

    with ThreadPoolExecutor(min(MAX_THREADS, usable_cores())) as threads:
        attempts = threads.map(attempt, indices)
        results = list(track(attempts, "checking images", len(indices), "image", keep=False))
    rejected = [rejection for rejection, _ in results if rejection is not None]
    return rejected, sum(seconds for _, seconds in results) / max(1, len(results))


def _reasons(rejected: list[Rejection], other_remedy: str) -> str:
    """The reasons with their counts, an example of the most common one, and its remedy."""
    reasons = Counter(rejection.reason for rejection in rejected).most_common()
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    most_common = reasons[0][0]
    example = next(rejection for rejection in rejected if rejection.reason == most_common)
    remedy = REMEDIES.get(most_common, other_remedy)
    shown = str(example) if remedy in example.detail else f"{example}: {remedy}"
    return f"({counts}); for example {shown}"
