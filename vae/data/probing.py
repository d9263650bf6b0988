"""Whether a folder can be trained on at all, asked of a few images before anything expensive starts."""

from collections import Counter

import numpy as np

from vae.config.errors import DataError
from vae.data.dataset import FolderDataset, Rejection

REMEDIES = {
    "too_small": "add --upscale or use a smaller --image_size",
    "too_many_pixels": "raise --max_pixels or make the images smaller",
    "format_not_supported": "convert them to PNG or JPEG",
    "jpeg_coding_not_supported": "convert them to PNG or 8-bit JPEG",
    "plugin_missing": "install the package named, or convert them to PNG or JPEG",
    "float_pixels": "save them as 16-bit",
    "animated": "save single frames",
    "transparent": "give images with visible pixels",
    "unreadable": "mend links and permissions",
    "broken_link": "mend the links",
    "no_permission": "mend the permissions",
}


def probe(dataset: FolderDataset, *, count: int = 16, flag: str = "--data_path") -> list[Rejection]:
    """Decode up to `count` images spread over the set and return those that cannot be used.

    Raises DataError, one line with the reasons, an example and a remedy, when it is all of them.
    """
    tried = np.unique(np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int))
    samples = [dataset[0, int(index)] for index in tried]
    rejected = [sample.rejection for sample in samples if sample.rejection is not None]
    if len(rejected) < len(tried):
        return rejected
    reasons = Counter(rejection.reason for rejection in rejected).most_common()
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    main = reasons[0][0]
    example = next(rejection for rejection in rejected if rejection.reason == main)
    remedy = REMEDIES.get(main, "copy the files again or give another folder")
    raise DataError(
        f"{flag} {dataset.root}: none of {len(tried)} images tried can be used ({counts}); "
        f"for example {example}: {remedy}"
    )
