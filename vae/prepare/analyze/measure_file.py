"""What one image is like: size, colours, sharpness, compression and its perceptual hash.

Shapes: H, W the image's sides; h, w those of a sample of its pixels.
"""

import os
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from vae.data.decoding import DECODER_ERRORS
from vae.data.formats import BadImageError
from vae.files import sha256_of_file
from vae.prepare.check_file import Rules, check_image
from vae.prepare.near_duplicates import hash_image_file, hash_pixels
from vae.prepare.pool import Failure

SAMPLE_SIDE = 256  # px: every n-th pixel, so that colours are those of the image and nothing is averaged
TILE, TILES_A_SIDE = 128, 4  # px; sharpness is looked for in 4 x 4 tiles at full resolution
ROUNDING = 20 / 12  # levels squared: the Laplacian's weights squared times the variance of rounding to levels
FLAT_TILE = 4.0  # levels squared: below this variance a tile holds noise, not edges
THUMBNAIL = 168  # px
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601
# ITU-T T.81, table K.1: what libjpeg scales by the quality.
LUMA_TABLE = np.array([
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
])  # fmt: skip


class Measurement(NamedTuple):
    """One image in numbers; levels go from 0 to 255."""

    sha256: str
    perceptual: tuple[int, int]
    format: str
    flags: tuple[str, ...]
    file_bytes: int
    width: int
    height: int
    channel_means: tuple[float, float, float]  # red, green, blue, levels
    channel_squares: tuple[float, float, float]  # means of squares
    brightness: float  # mean of luma, levels
    contrast: float  # standard deviation of luma, levels
    colorfulness: float
    sharpness: float
    clipped: float  # share of pixels with a channel at 0 or 255
    jpeg_quality: float  # 1 to 100; NaN for other formats


def measure_file(input_dir: str, rules: Rules, name: str) -> Measurement | Failure:
    """Measure one image, or say why it is rejected."""
    path = os.path.join(input_dir, name)
    try:
        image = check_image(path, rules)
        is_jpeg = image.format == "JPEG"
        # a JPEG's hash is that of its 64 px draft, the same one wherever it is made
        perceptual = (
            hash_image_file(path, max_pixels=rules.max_pixels) if is_jpeg else hash_pixels(image.pixels)
        )
        height, width = image.pixels.shape[:2]
        return Measurement(
            sha256_of_file(path),
            (int(perceptual[0]), int(perceptual[1])),
            image.format,
            image.flags,
            os.path.getsize(path),
            width,
            height,
            *measure_colors(image.pixels),
            jpeg_quality=estimate_jpeg_quality(path) if is_jpeg else float("nan"),
        )
    except BadImageError as error:
        return Failure(error.reason, error.detail)
    except OSError as error:  # it went away between two looks
        return Failure("unreadable", error.strerror or str(error))


def measure_colors(pixels: np.ndarray) -> tuple:
    """From channel means to the clipped share, in Measurement's order, of (H, W, 3) uint8."""
    height, width = pixels.shape[:2]
    sample = pixels[:: -(-height // SAMPLE_SIDE), :: -(-width // SAMPLE_SIDE)].reshape(-1, 3)  # (h w, 3)
    values = sample.astype(np.float32)
    luma = values @ LUMA
    return (
        tuple(values.mean(axis=0, dtype=np.float64).tolist()),
        tuple((values**2).mean(axis=0, dtype=np.float64).tolist()),
        float(luma.mean()),
        float(luma.std()),
        colorfulness(values),
        sharpness(pixels),
        float(((sample == 0) | (sample == 255)).any(axis=1).mean()),
    )


def colorfulness(values: np.ndarray) -> float:
    """Hasler and Suesstrunk 2003, M3, of (n, 3): 0 is grey, 33 moderately and 82 highly colourful."""
    red, green, blue = values.T
    one, other = red - green, (red + green) / 2 - blue
    return float(np.hypot(one.std(), other.std()) + 0.3 * np.hypot(one.mean(), other.mean()))


def sharpness(pixels: np.ndarray) -> float:
    """Variance of the Laplacian over that of brightness, in the sharpest of 16 tiles; 0 where all are flat.

    White noise has 20, the sum of the squares of the Laplacian's weights.
    """
    height, width = pixels.shape[:2]
    best = (0.0, 0.0)
    for row in range(TILES_A_SIDE):
        top = max(0, height - TILE) * row // (TILES_A_SIDE - 1)
        for column in range(TILES_A_SIDE):
            left = max(0, width - TILE) * column // (TILES_A_SIDE - 1)
            luma = pixels[top : top + TILE, left : left + TILE].astype(np.float32) @ LUMA  # (h, w)
            if min(luma.shape) < 3 or luma.var() < FLAT_TILE:
                continue
            middle = luma[1:-1, 1:-1]
            around = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:]
            edges = max(0.0, float((around - 4 * middle).var()) - ROUNDING)
            best = max(best, (edges, edges / float(luma.var())))
    return best[1]


def estimate_jpeg_quality(path: str | os.PathLike) -> float:
    """The libjpeg quality, 1 to 100, whose luminance table is nearest to a JPEG's; NaN without a table."""
    try:
        with Image.open(path, formats=("JPEG", "MPO")) as image:
            table = np.array(image.quantization.get(0, ()), dtype=np.float64)
    except DECODER_ERRORS:
        return float("nan")
    if table.shape != (64,):
        return float("nan")
    scales = np.array([5000 / q if q < 50 else 200 - 2 * q for q in range(1, 101)])
    tables = np.clip((LUMA_TABLE * scales[:, None] + 50) // 100, 1, 255)  # (100, 64)
    # sums, as both sides may list their numbers in another order
    return float(1 + np.argmin(np.abs(tables.sum(axis=1) - table.sum())))


def thumbnail_file(input_dir: str, rules: Rules, name: str) -> bytes | Failure:
    """A small JPEG of an image, at most 168 px wide and high."""
    try:
        pixels = check_image(os.path.join(input_dir, name), rules).pixels
    except BadImageError as error:
        return Failure(error.reason, error.detail)
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS, reducing_gap=3.0)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
