"""The images of a comparison: checked once, then cropped to each size in the same way for every VAE.

Shapes: B images of C channels and H x W px.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from vae.config.trained_vae_flags import MIN_SIZE, WHOLE, EvaluateConfig
from vae.data import image_files
from vae.data.image_sets import find_excluded
from vae.images.channels import resize
from vae.images.folder import list_images
from vae.images.formats import BadImageError
from vae.progress import track
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.shards.shard_cache import open_cache
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError

MAX_THREADS = 8  # Pillow decodes without the GIL; more threads only wait for the disk
CROPS = {
    "resize": "short side scaled to the size (bicubic, area-averaged), center crop",
    "center": "center crop, unscaled",
}
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ImageSet:
    """The images that are measured, and how they are cropped."""

    images: image_files.ImageSet
    indices: dict[str, int]  # number of each measured image by its name, in order
    crop: str  # one of CROPS
    background: str
    max_pixels: int
    channels: int = 3

    @property
    def names(self) -> list[str]:
        """Names of the images, in order."""
        return list(self.indices)

    def read(self, name: str, size: int) -> torch.Tensor:
        """uint8 (C, size, size) of one image, or (C, H, W) if `size` is WHOLE. Raises BadImageError."""
        pixels = self._decode(name)
        if size != WHOLE:
            pixels = square(pixels, size, self.crop)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def batches(self, size: int, batch_size: int) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Names and images (B, C, H, W), in order; threads decode a few batches ahead."""
        names = self.names
        groups = [names[at : at + batch_size] for at in range(0, len(names), batch_size)]

        def load(names: list[str]) -> torch.Tensor:
            try:
                return torch.stack([self.read(name, size) for name in names])
            except BadImageError as error:  # the file was readable when the comparison began
                where = self.images.location
                raise DataError(
                    f"--data_path {where}: {error}: do not change the images during a comparison"
                ) from error

        yield from zip(groups, in_threads(load, groups), strict=True)

    def why_unusable(self, name: str, largest: int) -> str | None:
        """The reason if an image cannot be measured at every size up to `largest`."""
        try:
            height, width = self._decode(name).shape[:2]
        except BadImageError as error:
            return str(error)
        least = max(largest, MIN_SIZE)
        if min(height, width) < least:
            return f"too_small: {width}x{height} px; each side needs at least {least} px"
        return None

    def _decode(self, name: str) -> np.ndarray:
        return self.images.decode(
            self.indices[name], max_pixels=self.max_pixels, background=self.background, channels=self.channels
        )


def square(pixels: np.ndarray, size: int, crop: str) -> np.ndarray:
    """Center crop (size, size, C) of (H, W, C); the short side is first scaled to `size` if `crop` is resize.

    Pillow's bicubic filter averages over areas when it reduces an image.
    """
    height, width = pixels.shape[:2]
    if crop == "resize" and min(height, width) != size:
        width, height = (max(size, round(side * size / min(height, width))) for side in (width, height))
        pixels = resize(pixels, (width, height), Image.Resampling.BICUBIC)
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


def find_images(config: EvaluateConfig, channels: int = 3) -> tuple[ImageSet, dict[str, str]]:
    """The images that can be measured at every size, and why others cannot. Raises DataError if none can."""
    source = _open(config)
    chosen = source.sample(config.max_images or len(source)).tolist()
    if config.exclude is not None:
        (excluded,) = find_excluded(config.exclude, {"chosen": (source, chosen)})
        chosen = np.setdiff1d(chosen, excluded.indices).tolist()
    names = [source.name(index) for index in chosen]
    indices = dict(zip(names, chosen, strict=True))
    images = ImageSet(source, indices, config.crop, config.background, config.max_pixels, channels)
    largest = max(config.sizes)
    reasons = in_threads(lambda name: images.why_unusable(name, largest), names)
    bar = track(reasons, "checking images", len(names), "image", keep=False)
    unusable = {name: reason for name, reason in zip(names, bar, strict=True) if reason is not None}
    if len(unusable) == len(names):
        name, reason = next(iter(unusable.items()))
        remedy = ": lower --sizes" if reason.startswith("too_small") and largest > MIN_SIZE else ""
        raise DataError(
            f"--data_path {config.data_path}: none of its {len(names)} images can be "
            f"measured; the first is {name}: {reason}{remedy}"
        )
    usable = {name: index for name, index in indices.items() if name not in unusable}
    return replace(images, indices=usable), unusable


def _open(config: EvaluateConfig) -> image_files.ImageSet:
    """The images of --data_path. Raises DataError or UserError if there are none."""
    if not is_dataset(config.data_path):
        return image_files.FolderImages(config.data_path, list_images(config.data_path))
    dataset = read_dataset(config.data_path)
    return ShardImages([dataset], 1, open_cache([dataset], config.cache_dir, config.cache_gib))


def in_threads(work: Callable[..., _Result], items: Sequence) -> Iterator[_Result]:
    """The results of `work` for each item, in order; threads compute a few items ahead."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
