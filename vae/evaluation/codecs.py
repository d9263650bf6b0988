"""JPEG and WebP at a number of bytes: what a latent of as many bytes has to beat.

Shapes: pictures are uint8 (3, H, W) on the CPU.
"""

import io

import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

CODECS = {"JPEG": {"optimize": True}, "WebP": {"method": 4}}  # by Pillow's names; colour at half resolution
QUALITIES = (1, 95)  # above 95 Pillow's JPEG only grows


def bits_per_pixel(channels: int, downsampling: int) -> float:
    """Of a latent stored in 8 bit per value."""
    return 8 * channels / downsampling**2


def latent_bytes(height: int, width: int, channels: int, downsampling: int) -> int:
    """Bytes of the latent of an H x W picture in 8 bit per value."""
    return channels * -(-height // downsampling) * -(-width // downsampling)


def through_codec(picture: torch.Tensor, codec: str, budget: int) -> torch.Tensor | None:
    """The picture at the best quality whose whole file has at most `budget` bytes; None: no quality does."""
    image = to_pil_image(picture)
    low, high = QUALITIES
    best = None
    while low <= high:  # bytes grow with quality
        middle = (low + high) // 2
        content = _encode(image, codec, middle)
        if len(content) <= budget:
            best, low = content, middle + 1
        else:
            high = middle - 1
    return None if best is None else pil_to_tensor(Image.open(io.BytesIO(best)).convert("RGB"))


def _encode(image: Image.Image, codec: str, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=codec, quality=quality, **CODECS[codec])
    return buffer.getvalue()
