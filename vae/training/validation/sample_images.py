"""The user's own images for the sample grids: --sample_images."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from vae.evaluation.protocols import square
from vae.images.decoding import decode_image
from vae.images.folder import list_images
from vae.images.formats import BadImageError
from vae.system import console
from vae.system.errors import DataError

MAX_SAMPLE_IMAGES = 8


def load_sample_images(
    folder: str, image_sizes: Iterable[int], *, background: str, max_pixels: int
) -> dict[int, torch.Tensor]:
    """The first images of `folder` by name, for each image size S: uint8 (N, 3, S, S).

    Each image is scaled by its shorter side, and its centre is cropped. Raises DataError if the folder
    contains no images or one of them cannot be read.
    """
    names = list_images(folder, flag="--sample_images")
    if len(names) > MAX_SAMPLE_IMAGES:
        console.info(
            f"--sample_images {folder}: the grids show the first {MAX_SAMPLE_IMAGES} of {len(names)} images"
        )
    crops: dict[int, list[torch.Tensor]] = {size: [] for size in image_sizes}
    for name in names[:MAX_SAMPLE_IMAGES]:
        try:
            pixels = decode_image(Path(folder) / name, max_pixels=max_pixels, background=background)
        except BadImageError as error:
            raise DataError(
                f"--sample_images {folder}: {console.printable(name)}: {error}: remove or replace this file"
            ) from None
        for size, images in crops.items():
            crop = np.ascontiguousarray(square(pixels, size, "resize").transpose(2, 0, 1))
            images.append(torch.from_numpy(crop))
    return {size: torch.stack(images) for size, images in crops.items()}
