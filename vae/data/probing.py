"""A quick test, before anything expensive starts, whether the images of a folder can be used."""

from collections import Counter

import numpy as np

from vae.config.errors import DataError
from vae.data.dataset import FolderDataset, Rejection

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


def probe(dataset: FolderDataset, *, count: int = 16, flag: str = "--data_path") -> list[Rejection]:
    """Decode up to `count` images spread over the set and return the rejections.

    If all are rejected, raises DataError: one line with the reasons, an example and a remedy.
    """
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int))
    samples = [dataset[0, int(index)] for index in indices]
    rejected = [sample.rejection for sample in samples if sample.rejection is not None]
    if len(rejected) < len(indices):
        return rejected
    reasons = Counter(rejection.reason for rejection in rejected).most_common()
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    most_common = reasons[0][0]
    example = next(rejection for rejection in rejected if rejection.reason == most_common)
    remedy = REMEDIES.get(most_common, "copy the files again or give another folder")
    shown = str(example) if remedy in example.detail else f"{example}: {remedy}"
    raise DataError(
        f"{flag} {dataset.root}: none of the {len(indices)} images that were tried can be used ({counts}); "
        f"for example {shown}"
    )
