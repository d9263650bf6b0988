"""Augmentations of a training image as pure functions of its pixels and random words.

Shapes: H x W = the image, S = image_size.
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageEnhance

from vae.images.formats import BadImageError


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
    """A random region of (H, W, 3) as (S, S, 3), like RandomResizedCrop of Inception (Szegedy et al. 2015).

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
    region = Image.fromarray(pixels).crop((left, top, left + w, top + h))
    return np.asarray(region.resize((size, size), Image.Resampling.LANCZOS))


def cover_crop(
    pixels: np.ndarray, words: Sequence[int] | None, shape: tuple[int, int], enlarge: bool
) -> np.ndarray:
    """(H, W, 3) scaled to cover a shape (height, width), and cut to it; the centre without `words`.

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
    h, w = min(height, high / scale), min(width, wide / scale)  # what is visible of the image
    down, across = (unit(word) for word in words) if words is not None else (0.5, 0.5)
    top, left = (height - h) * down, (width - w) * across
    if scale == 1:
        return pixels[int(top) : int(top) + high, int(left) : int(left) + wide]
    edges = left, top, min(left + w, width), min(top + h, height)
    return np.asarray(Image.fromarray(pixels).resize((wide, high), Image.Resampling.LANCZOS, box=edges))


def color_jitter(pixels: np.ndarray, words: Sequence[int], strengths: tuple[float, ...]) -> np.ndarray:
    """(H, W, 3) with brightness, contrast, saturation and hue changed by up to `strengths`, in this order.

    The first three are factors in [1 - strength, 1 + strength]; hue turns by up to its strength of a circle.
    """
    image = Image.fromarray(pixels)
    shifts = [strength * (2 * unit(word) - 1) for word, strength in zip(words, strengths, strict=True)]
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for enhancer, shift in zip(enhancers, shifts[:3], strict=True):
        if shift:
            image = enhancer(image).enhance(1 + shift)
    if shifts[3]:
        hsv = np.array(image.convert("HSV"))
        hsv[..., 0] += np.uint8(round(shifts[3] * 256) % 256)  # wraps around the circle
        image = Image.fromarray(hsv, "HSV").convert("RGB")
    return np.asarray(image)
