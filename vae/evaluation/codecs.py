"""JPEG and WebP with a limited number of bytes, for comparison with a latent of as many bytes.

Shapes: images are uint8 (3, H, W) on the CPU.
"""

import io
from typing import Any

import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

# Pillow's names and options; both store colour at half resolution
CODECS: dict[str, dict[str, Any]] = {"JPEG": {"optimize": True}, "WebP": {"method": 4}}
QUALITIES = (1, 95)  # above 95, Pillow's JPEG files only grow


def bits_per_pixel(channels: int, downsampling: int) -> float:
    """Bits per image pixel of a latent stored in 8 bit per value."""
    return 8 * channels / downsampling**2


def latent_bytes(height: int, width: int, channels: int, downsampling: int) -> int:
    """Bytes of the latent of an H x W image, stored in 8 bit per value."""
    return channels * -(-height // downsampling) * -(-width // downsampling)


def through_codec(image: torch.Tensor, codec: str, budget: int) -> torch.Tensor | None:
    """The image at the best quality whose file has at most `budget` bytes; None if there is none."""
    pil_image = to_pil_image(image)
    low, high = QUALITIES
    best = None
    while low <= high:  # a better quality needs more bytes
        middle = (low + high) // 2
        content = _encode(pil_image, codec, middle)
        if len(content) <= budget:
            best, low = content, middle + 1
        else:
            high = middle - 1
    return None if best is None else pil_to_tensor(Image.open(io.BytesIO(best)).convert("RGB"))


def _encode(pil_image: Image.Image, codec: str, quality: int) -> bytes:
    buffer = io.BytesIO()
    pil_image.save(buffer, format=codec, quality=quality, **CODECS[codec])
    return buffer.getvalue()
