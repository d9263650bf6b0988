"""Training crops of image files, and their collation into batches.

Shapes: B usable images of a batch, S = image_size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vae.config.options import MAX_PIXELS
from vae.console import printable
from vae.data.decoding import decode_image, parse_background
from vae.data.formats import BadImageError


class Rejection(NamedTuple):
    """An unusable image file and the reason; `str()` gives one printable line."""

    name: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.reason} ({self.detail})")


@dataclass(frozen=True)
class Sample:
    """The crop of one image, or its rejection; exactly one of the two is not None."""

    epoch: int
    index: int
    image: Tensor | None  # uint8 (3, S, S)
    rejection: Rejection | None


@dataclass
class Batch:
    """Images of one step; unusable ones are listed in `rejected` and are not replaced."""

    images: Tensor  # uint8 (B, 3, S, S)
    epochs: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,)
    rejected: list[Rejection] = field(default_factory=list)

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked memory; DataLoader calls this with pin_memory=True."""
        return Batch(
            self.images.pin_memory(), self.epochs.pin_memory(), self.indices.pin_memory(), self.rejected
        )


class FolderDataset(Dataset[Sample]):
    """Crops of the listed image files by key (epoch, index); a key gives the same crop in every process."""

    def __init__(
        self,
        root: str | os.PathLike[str],
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
        parse_background(background)  # a wrong colour fails here, not in a worker
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
            pixels = self._ensure_crop_fits(pixels)
        except BadImageError as error:
            return Sample(epoch, index, None, Rejection(name, error.reason, error.detail))
        crop = self._crop(pixels, epoch, index)  # (S, S, 3)
        image = torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)))  # (3, S, S)
        return Sample(epoch, index, image, None)

    def _ensure_crop_fits(self, pixels: np.ndarray) -> np.ndarray:
        """Enlarge an image that is smaller than the crop; BadImageError if that is not allowed."""
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
        """Cut (S, S, 3) out of (H, W, 3); position and flip are functions of (seed, epoch, index)."""
        size = self.image_size
        largest_offsets = pixels.shape[0] - size, pixels.shape[1] - size
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, index])).random_raw(3)
        if self.crop == "random":
            offsets = zip(words[:2], largest_offsets, strict=True)
            top, left = (int(word) % (most + 1) for word, most in offsets)
        else:
            top, left = (most // 2 for most in largest_offsets)
        crop = pixels[top : top + size, left : left + size]
        if self.horizontal_flip and int(words[2]) >> 63:
            crop = crop[:, ::-1]
        return crop


def collate(samples: Sequence[Sample], *, image_size: int) -> Batch:
    """Combine samples into a batch; rejected images make it smaller, down to (0, 3, S, S)."""
    good = [sample for sample in samples if sample.image is not None]
    images = torch.empty((len(good), 3, image_size, image_size), dtype=torch.uint8)
    for row, sample in zip(images, good, strict=True):
        assert sample.image is not None
        row.copy_(sample.image)
    return Batch(
        images=images,
        epochs=torch.tensor([sample.epoch for sample in good], dtype=torch.int64),
        indices=torch.tensor([sample.index for sample in good], dtype=torch.int64),
        rejected=[sample.rejection for sample in samples if sample.rejection is not None],
    )
