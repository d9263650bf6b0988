"""Measurements of one image: levels, sharpness and compression.

Shapes: H, W are the image's sides; h, w are those of a sample of its pixels.
"""

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vae.images.decoding import DecodedImage
from vae.images.formats import DECODER_ERRORS

SAMPLE_SIDE = 256  # px: every n-th pixel is used, so that colours are exact and not averaged
TILE, TILES_A_SIDE = 128, 4  # px; sharpness is measured in 4 x 4 tiles at full resolution
ROUNDING = 20 / 12  # levels squared: sum of the Laplacian's squared weights times the variance of rounding
FLAT_TILE = 4.0  # levels squared: below this variance a tile contains noise, not edges
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601
# ITU-T T.81, table K.1, which libjpeg scales by the quality.
LUMA_TABLE = np.array([
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
])  # fmt: skip


def measure_image(image: DecodedImage, data: bytes) -> dict[str, Any]:
    """Levels from 0 to 255, sharpness, and `jpeg_quality`, which is None for other formats."""
    height, width = image.pixels.shape[:2]
    sample = image.pixels[:: -(-height // SAMPLE_SIDE), :: -(-width // SAMPLE_SIDE)]  # (h, w, 3)
    # A channel in one piece: a mean over the first axis of (h w, 3) takes four times as long.
    values = np.ascontiguousarray(sample.reshape(-1, 3).T, np.float64)  # (3, h w)
    luma = LUMA @ values
    return {
        "channel_means": values.mean(axis=1).tolist(),
        "channel_squares": (np.einsum("cn,cn->c", values, values) / values.shape[1]).tolist(),
        "brightness": float(luma.mean()),
        "contrast": float(luma.std()),
        "sharpness": sharpness(image.pixels),
        "jpeg_quality": estimate_jpeg_quality(data) if image.format == "JPEG" else None,
    }


def sharpness(pixels: np.ndarray) -> float:
    """Variance of the Laplacian over that of brightness, in the sharpest of 16 tiles; 0 if all are flat.

    White noise has 20, the sum of the Laplacian's squared weights.
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


def estimate_jpeg_quality(data: bytes) -> float | None:
    """The libjpeg quality, 1 to 100, with the luminance table nearest to a JPEG's; None without a table."""
    try:
        with Image.open(BytesIO(data), formats=("JPEG", "MPO")) as image:
            table = np.array(image.quantization.get(0, ()), dtype=np.float64)
    except DECODER_ERRORS:
        return None
    if table.shape != (64,):
        return None
    scales = np.array([5000 / q if q < 50 else 200 - 2 * q for q in range(1, 101)])
    tables = np.clip((LUMA_TABLE * scales[:, None] + 50) // 100, 1, 255)  # (100, 64)
    # compare sums, because the order of the entries may differ
    return float(1 + np.argmin(np.abs(tables.sum(axis=1) - table.sum())))
