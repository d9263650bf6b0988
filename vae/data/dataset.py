"""Training crops of image files, and their collation into batches.

Shapes: B usable images of a batch, C channels, S = image_size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.utils.data import Dataset

from vae.config.options import NO_JITTER, DataConfig
from vae.data.exclude_list import Excluded
from vae.data.image_files import ImageSet
from vae.images.channels import resize, with_channels
from vae.images.decoding import parse_background
from vae.images.formats import BadImageError
from vae.sampling.buckets import Shape, aspects, nearest
from vae.sampling.order import Key
from vae.system.console import printable


def unit(word: int) -> float:
    """A random word of 64 bits as a number in [0, 1)."""
    return (word >> 11) * 2.0**-53


def resized_crop(
    pixels: np.ndarray,
    words: Sequence[int],
    size: int,
    scale: tuple[float, ...],
    ratio: tuple[float, ...],
    enlarge: bool,
) -> np.ndarray:
    """A random region of (H, W, C) as (S, S, C), like RandomResizedCrop of Inception (Szegedy et al. 2015).

    The area is uniform in `scale` (of the image's area), the logarithm of width / height in `ratio`. The
    region is limited to the image and, without `enlarge`, to at least S on both sides.
    """
    height, width = pixels.shape[:2]
    area = height * width * (scale[0] + unit(words[0]) * (scale[1] - scale[0]))
    low, high = (math.log(limit) for limit in ratio)
    aspect = math.exp(low + unit(words[1]) * (high - low))
    least = 1 if enlarge else size
    w = min(max(round(math.sqrt(area * aspect)), least), width)
    h = min(max(round(math.sqrt(area / aspect)), least), height)
    left, top = words[2] % (width - w + 1), words[3] % (height - h + 1)
    region = pixels[top : top + h, left : left + w]
    return resize(region, (size, size), Image.Resampling.LANCZOS)


def cover_crop(
    pixels: np.ndarray, words: Sequence[int] | None, shape: tuple[int, int], enlarge: bool
) -> np.ndarray:
    """(H, W, C) scaled to cover a shape (height, width), and cut to it; the centre without `words`.

    Raises BadImageError if the image is smaller, unless `enlarge`.
    """
    (height, width), (high, wide) = pixels.shape[:2], shape
    scale = max(high / height, wide / width)
    if scale > 1 and not enlarge:
        raise BadImageError(
            "too_small",
            f"{width}x{height} is below its {wide}x{high} of --buckets: add --upscale or use a smaller "
            "--image_size",
        )
    h, w = min(height, high / scale), min(width, wide / scale)  # the part of the image that remains
    down, across = (unit(word) for word in words) if words is not None else (0.5, 0.5)
    top, left = (height - h) * down, (width - w) * across
    if scale == 1:
        return pixels[int(top) : int(top) + high, int(left) : int(left) + wide]
    edges = left, top, min(left + w, width), min(top + h, height)
    return resize(pixels, (wide, high), Image.Resampling.LANCZOS, box=edges)


def color_jitter(pixels: np.ndarray, words: Sequence[int], strengths: tuple[float, ...]) -> np.ndarray:
    """(H, W, C) with brightness, contrast, saturation and hue changed by up to `strengths`, in this order.

    The first three are factors in [1 - strength, 1 + strength]; hue turns by up to its strength of a circle.
    Alpha stays.
    """
    colors = pixels[..., :3]
    image = Image.fromarray(colors.repeat(3 // colors.shape[2], axis=2))
    shifts = [strength * (2 * unit(word) - 1) for word, strength in zip(words, strengths, strict=True)]
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for enhancer, shift in zip(enhancers, shifts[:3], strict=True):
        if shift:
            image = enhancer(image).enhance(1 + shift)
    if shifts[3]:
        hsv = np.array(image.convert("HSV"))
        hsv[..., 0] += np.uint8(round(shifts[3] * 256) % 256)  # wraps around the circle
        image = Image.fromarray(hsv, "HSV").convert("RGB")
    return with_channels(np.dstack([np.asarray(image), pixels[..., 3:]]), pixels.shape[2])


class Rejection(NamedTuple):
    """An unusable image file and the reason; `str()` gives one printable line."""

    name: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.reason} ({self.detail})")


@dataclass(frozen=True)
class Sample:
    """The crop of one image, or its rejection; neither of an image that is excluded."""

    epoch: int
    index: int
    image: Tensor | None  # uint8 (C, S, S), or of the image's bucket
    rejection: Rejection | None


@dataclass
class Batch:
    """Images of one step; unusable ones are listed in `rejected` and are not replaced."""

    images: Tensor  # uint8 (B, C, S, S), or of one bucket
    epochs: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,)
    rejected: list[Rejection] = field(default_factory=list)
    excluded: int = 0  # images that --exclude names, which are not replaced either
    # ImageSet.counts of the process that made the batch, its time (load_seconds), and the CPU time in it
    # (decode_seconds).
    counts: dict[str, float] = field(default_factory=dict)

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked memory; DataLoader calls this with pin_memory=True."""
        images, epochs, indices = (part.pin_memory() for part in (self.images, self.epochs, self.indices))
        return replace(self, images=images, epochs=epochs, indices=indices)


DEFAULTS = DataConfig()


class CropDataset(Dataset[Sample]):
    """Crops of image files by key (epoch, index); a key gives the same crop in every process."""

    def __init__(
        self,
        images: ImageSet,
        data: DataConfig = DEFAULTS,
        *,
        image_size: int,
        channels: int = 3,
        seed: int = 0,
        shapes: Sequence[Shape] | None = None,
        excluded: Excluded | None = None,
    ):
        """`data`: how images are read, cropped and changed. `image_size` is that of the stage.

        `shapes`: crops have the shape of their key, and images are scaled to cover it.
        `excluded`: images that are not read.
        """
        parse_background(data.background)  # a wrong colour fails here, not in a worker
        self.images = images
        self.data = data
        self.image_size = image_size
        self.channels = channels
        self.seed = seed
        self.shapes = shapes
        self.excluded = excluded or Excluded()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int] | Key) -> Sample:
        """The crop of a key; without a shape, it is a square or the nearest bucket of the image."""
        epoch, index, *given = key
        if index in self.excluded:
            return Sample(epoch, index, None, None)
        try:
            pixels = self.images.decode(
                index,
                max_pixels=self.data.max_pixels,
                background=self.data.background,
                channels=self.channels,
            )
            if self.shapes is None:
                pixels = self._ensure_crop_fits(pixels)
            crop = self._crop(pixels, epoch, index, given[0] if given else None)
        except BadImageError as error:
            return Sample(epoch, index, None, Rejection(self.images.name(index), error.reason, error.detail))
        image = torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)))  # (C, S, S)
        return Sample(epoch, index, image, None)

    def _ensure_crop_fits(self, pixels: np.ndarray) -> np.ndarray:
        """Enlarge an image that is smaller than the crop; BadImageError if that is not allowed."""
        height, width = pixels.shape[:2]
        short = min(height, width)
        size = self.image_size
        if short >= size:
            return pixels
        if not self.data.upscale:
            raise BadImageError(
                "too_small",
                f"{width}x{height} is below --image_size {size}: add --upscale or use a smaller --image_size",
            )
        new_width, new_height = (max(size, round(side * size / short)) for side in (width, height))
        if new_width * new_height > self.data.max_pixels:
            raise BadImageError(
                "too_many_pixels",
                f"{width}x{height} enlarged is {new_width}x{new_height}, above --max_pixels",
            )
        return resize(pixels, (new_width, new_height), Image.Resampling.LANCZOS)

    def _crop(self, pixels: np.ndarray, epoch: int, index: int, shape: Shape | None) -> np.ndarray:
        """Make (S, S, C), or one of the shape; everything random is a function of (seed, epoch, index)."""
        size, data = self.image_size, self.data
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, index])).random_raw(12).tolist()
        if self.shapes is not None:
            size_of_image = np.array([[pixels.shape[1], pixels.shape[0]]])
            shape = shape or self.shapes[int(nearest(aspects(size_of_image), self.shapes)[0])]
            crop = cover_crop(pixels, words[:2] if data.crop == "random" else None, shape, data.upscale)
        elif data.crop == "resized":
            crop = resized_crop(pixels, words[3:7], size, data.crop_scale, data.crop_ratio, data.upscale)
        else:
            largest_offsets = pixels.shape[0] - size, pixels.shape[1] - size
            if data.crop == "random":
                offsets = zip(words[:2], largest_offsets, strict=True)
                top, left = (word % (most + 1) for word, most in offsets)
            else:
                top, left = (most // 2 for most in largest_offsets)
            crop = pixels[top : top + size, left : left + size]
        if data.horizontal_flip and words[2] >> 63:
            crop = crop[:, ::-1]
        if data.rotate90:
            crop = np.rot90(crop, words[7] >> 62)
        if data.color_jitter != NO_JITTER:
            crop = color_jitter(crop, words[8:], data.color_jitter)
        return crop


def collate(samples: Sequence[Sample], *, image_size: int, channels: int = 3) -> Batch:
    """Combine samples of one shape into a batch; rejected images make it smaller, down to (0, C, S, S)."""
    good = [sample for sample in samples if sample.image is not None]
    nothing = (channels, image_size, image_size)
    shape = good[0].image.shape if good and good[0].image is not None else nothing
    images = torch.empty((len(good), *shape), dtype=torch.uint8)
    for row, sample in zip(images, good, strict=True):
        assert sample.image is not None
        row.copy_(sample.image)
    rejected = [sample.rejection for sample in samples if sample.rejection is not None]
    return Batch(
        images=images,
        epochs=torch.tensor([sample.epoch for sample in good], dtype=torch.int64),
        indices=torch.tensor([sample.index for sample in good], dtype=torch.int64),
        rejected=rejected,
        excluded=len(samples) - len(good) - len(rejected),
    )
