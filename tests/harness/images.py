"""The images of a folder, and what a reconstruction makes of them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.harness.runs import TINY


def centre_crops(folder: Path) -> list[torch.Tensor]:
    """uint8 (1, 3, S, S) of all PNG files, with the image size of TINY."""
    size = TINY["image_size"]
    crops = []
    for path in sorted(folder.rglob("*.png")):
        pixels = np.array(Image.open(path))
        top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
        crops.append(torch.from_numpy(pixels[top : top + size, left : left + size]).permute(2, 0, 1)[None])
    return crops


def pair(batch: int = 3, size: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth images with noise, and a reconstruction that differs from them."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(batch, 3, 4, 4, generator=generator) * 2 - 1
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(-1, 1)
    noise = torch.randn(images.shape, generator=generator)
    return images + 0.1 * noise, images
