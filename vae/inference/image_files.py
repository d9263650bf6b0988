"""Image files as tensors, and 8-bit pixels as PNG files."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vae.config.trained_vae_flags import InferConfig
from vae.images.decoding import decode_image
from vae.images.formats import BadImageError
from vae.images.pixels import to_float
from vae.inference.codec import MIN_SIDE
from vae.system.files import atomic_path


def read_image(path: Path, config: InferConfig) -> torch.Tensor:
    """fp32 (1, 3, H, W) in [-1, 1] of an image file, upright and in sRGB. Raises BadImageError."""
    pixels = decode_image(path, max_pixels=config.max_pixels, background=config.background)
    height, width = pixels.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise BadImageError("too_small", f"{width}x{height} px; each side needs at least {MIN_SIDE} px")
    return to_float(torch.from_numpy(pixels).permute(2, 0, 1)[None])


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 (H, W, 3) or grey (H, W) pixels as PNG, atomically."""
    with atomic_path(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG")
