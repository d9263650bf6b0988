"""An image of the set as a training crop, and a list of crops as a batch.

Shapes: B images of a batch that could be used, S = image_size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vae.config.options import MAX_PIXELS
from vae.console import printable
from vae.data.decoding import decode_image, parse_background
from vae.data.formats import BadImageError


class Rejection(NamedTuple):
    """An image that cannot be used and why; `str()` of it is one printable line."""

    name: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.reason} ({self.detail})")


class Sample(NamedTuple):
    """One image's crop, or its rejection; exactly one of both is there."""

    epoch: int
    index: int
    image: Tensor | None  # uint8 (3, S, S)
    rejection: Rejection | None


@dataclass
class Batch:
    """Images of one step; those that could not be used are in `rejected` and nothing takes their place."""

    images: Tensor  # uint8 (B, 3, S, S)
    epochs: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,)
    rejected: list[Rejection] = field(default_factory=list)

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; the loader calls it where the device is a GPU."""
        return Batch(
            self.images.pin_memory(), self.epochs.pin_memory(), self.indices.pin_memory(), self.rejected
        )


class FolderDataset:
    """Crops of listed images by the key (epoch, index): the same key gives the same crop in any process."""

    def __init__(
        self,
        root: str | os.PathLike,
        names: Sequence[str],
        *,
        image_size: int,
        crop: str = "random",
        horizontal_flip: bool = True,
        upscale: bool = False,
        background: str = "white",
        max_pixels: int = MAX_PIXELS,
        seed: int = 0,
    ):
        assert crop in ("random", "center")
        parse_background(background)  # a wrong colour is told here, not by a worker
        self.root = os.fspath(root)
        self.names = names
        self.image_size = image_size
        self.crop = crop
        self.horizontal_flip = horizontal_flip
        self.upscale = upscale
        self.background = background
        self.max_pixels = max_pixels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        name = self.names[index]
        try:
            pixels = decode_image(
                os.path.join(self.root, name), max_pixels=self.max_pixels, background=self.background
            )
            pixels = self._fit(pixels)
        except BadImageError as error:
            return Sample(epoch, index, None, Rejection(name, error.reason, error.detail))
        crop = self._crop(pixels, epoch, index)  # (S, S, 3)
        image = torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)))  # (3, S, S)
        return Sample(epoch, index, image, None)

    def _fit(self, pixels: np.ndarray) -> np.ndarray:
        """Make sure that a crop fits, by enlarging where that is allowed."""
        height, width = pixels.shape[:2]
        short, size = min(height, width), self.image_size
        if short >= size:
            return pixels
        if not self.upscale:
            raise BadImageError(
                "too_small",
                f"{width}x{height} is below --image_size {size}: add --upscale or use a smaller --image_size",
            )
        new_width, new_height = (max(size, round(side * size / short)) for side in (width, height))
        if new_width * new_height > self.max_pixels:
            raise BadImageError(
                "too_many_pixels",
                f"{width}x{height} enlarged is {new_width}x{new_height}, above --max_pixels",
            )
        return np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.LANCZOS))

    def _crop(self, pixels: np.ndarray, epoch: int, index: int) -> np.ndarray:
        """Cut (S, S, 3) out of (H, W, 3); all chance is a function of (seed, epoch, index)."""
        size = self.image_size
        spare = pixels.shape[0] - size, pixels.shape[1] - size
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, index])).random_raw(3)
        if self.crop == "random":
            top, left = (int(word) % (room + 1) for word, room in zip(words[:2], spare, strict=True))
        else:
            top, left = (room // 2 for room in spare)
        crop = pixels[top : top + size, left : left + size]
        if self.horizontal_flip and int(words[2]) >> 63:
            crop = crop[:, ::-1]
        return crop


def collate(samples: Sequence[Sample], *, image_size: int) -> Batch:
    """Samples as a batch: images that were rejected make it smaller, down to (0, 3, S, S)."""
    good = [sample for sample in samples if sample.image is not None]
    images = torch.empty((len(good), 3, image_size, image_size), dtype=torch.uint8)
    for row, sample in zip(images, good, strict=True):
        row.copy_(sample.image)
    return Batch(
        images=images,
        epochs=torch.tensor([sample.epoch for sample in good], dtype=torch.int64),
        indices=torch.tensor([sample.index for sample in good], dtype=torch.int64),
        rejected=[sample.rejection for sample in samples if sample.rejection is not None],
    )
