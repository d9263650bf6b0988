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
