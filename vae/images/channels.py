"""Pixels of one channel (grey), three (RGB) or four: RGB and alpha, which is straight, as in PNG files.

Pixels with alpha 0 have no color that anyone sees. They are black, so that no network learns another color of
them. Shapes: arrays are uint8 (H, W, C).
"""

import numpy as np
from PIL import Image

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow converts RGB to grey
# By the number of channels: an opaque image of RGB colors in [-1, 1] is FROM_RGB @ colors + OPAQUE.
FROM_RGB = {1: np.array([LUMA]), 3: np.eye(3), 4: np.eye(4, 3)}  # (C, 3)
OPAQUE = {1: np.zeros(1), 3: np.zeros(3), 4: np.eye(4)[3]}  # (C,): alpha is 1
TO_RGB = {1: np.ones((3, 1)), 3: np.eye(3), 4: np.eye(3, 4)}  # (3, C): the colors of an opaque image


def with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """RGB pixels, or those with alpha, as (H, W, channels). Alpha is only dropped if it is 255."""
    if channels == 1:
        return np.array(Image.fromarray(pixels).convert("L"))[..., None]
    if channels == 4:
        return (
            hide_colors(pixels)
            if pixels.shape[2] == 4
            else np.dstack([pixels, np.full_like(pixels[..., 0], 255)])
        )
    return pixels


def hide_colors(pixels: np.ndarray) -> np.ndarray:
    """Pixels whose alpha is 0 are black; others are unchanged."""
    return pixels * (pixels[..., 3:] > 0) if pixels.shape[2] == 4 else pixels


def to_pil(pixels: np.ndarray) -> Image.Image:
    """The image of mode L, RGB or RGBA."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def resize(
    pixels: np.ndarray,
    size: tuple[int, int],
    filter: Image.Resampling,
    box: tuple[float, float, float, float] | None = None,
) -> np.ndarray:
    """`box` of the pixels (left, top, right, bottom) as `size` (width, height).

    Pillow multiplies colors by alpha first, so that invisible ones do not bleed into others.
    """
    resized = np.array(to_pil(pixels).resize(size, filter, box=box))
    return resized[..., None] if resized.ndim == 2 else resized
