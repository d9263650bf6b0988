"""Encode pixels as image files: JPEG with full colour resolution, PNG or WebP."""

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

EXTENSIONS = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


def encode(pixels: np.ndarray, file_format: str, quality: int) -> memoryview:
    """uint8 (H, W, 3) pixels as the bytes of an image file; JPEG is 4:4:4, PNG ignores the quality."""
    options: dict[str, Any] = {
        "jpeg": {"quality": quality, "subsampling": 0},
        "png": {},
        "webp": {"quality": quality},
    }[file_format]
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, file_format.upper(), **options)
    return buffer.getbuffer()
