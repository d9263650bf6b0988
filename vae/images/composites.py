"""Images with alpha, and grey images, as the RGB images that losses, metrics and people see.

Color and alpha are seen together over a background only: losses and metrics compare images over black and
over white, which together determine both. Alpha is straight, as in vae/images/channels.py.

Shapes: B images of C channels, (B, C, H, W) in [-1, 1].
"""

import numpy as np
import torch
from PIL import Image

from vae.images.pixels import to_float, to_uint8

BACKGROUNDS = (-1.0, 1.0)  # black and white
CHECKERS = (0.0, 0.5)  # the greys of a checkerboard
CHECKER_PX = 8


def as_rgb(images: torch.Tensor) -> torch.Tensor:
    """RGB images (B, 3, H, W). With alpha, they are all over black, then all over white: (2B, 3, H, W).

    These are in fp32 at least.
    """
    channels = images.shape[1]
    if channels == 4:
        return torch.cat([_over(images, background) for background in BACKGROUNDS])
    return images.expand(-1, 3, -1, -1) if channels == 1 else images


def per_image(values: torch.Tensor, count: int) -> torch.Tensor:
    """Values of what `as_rgb` returns for `count` images, as the mean of each image: (count, ...)."""
    return values if len(values) == count else values.unflatten(0, (-1, count)).mean(0)


def alphas(images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The alpha of the images as grey images (B, 1, H, W), or nothing."""
    return images[:, 3:].split(1, 1) if images.shape[1] == 4 else ()


def over_checkerboard(images: torch.Tensor) -> torch.Tensor:
    """RGB images (B, 3, H, W) to look at: those with alpha are over a checkerboard."""
    if images.shape[1] != 4:
        return as_rgb(images)
    rows, columns = (torch.arange(side, device=images.device) // CHECKER_PX for side in images.shape[2:])
    dark, light = CHECKERS
    return _over(images, dark + (light - dark) * ((rows[:, None] + columns) % 2))


def shown(image: Image.Image) -> Image.Image:
    """The RGB image to look at."""
    if image.mode != "RGBA":
        return image.convert("RGB")
    pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)
    rgb = to_uint8(over_checkerboard(to_float(pixels[None])))[0]
    return Image.fromarray(rgb.movedim(0, -1).numpy())


def difference(recon: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """The absolute difference of images in RGB (B, 3, H, W), the mean of those over black and over white."""
    return per_image((as_rgb(recon) - as_rgb(images)).abs(), len(images))


def premultiply(images: torch.Tensor) -> torch.Tensor:
    """Images with the colors over black, so that filters do not mix invisible colors into others."""
    return torch.cat([_over(images, -1.0), images[:, 3:]], 1) if images.shape[1] == 4 else images


def unpremultiply(images: torch.Tensor) -> torch.Tensor:
    """The inverse of `premultiply`, limited to [-1, 1]; black where alpha is 0."""
    if images.shape[1] != 4:
        return images
    alpha = (images[:, 3:] + 1) / 2
    colors = torch.where(alpha > 0, (images[:, :3] + 1) / alpha - 1, -1.0)
    return torch.cat([colors.clamp(-1, 1), images[:, 3:]], 1)


def _over(images: torch.Tensor, background: float | torch.Tensor) -> torch.Tensor:
    """The colors (B, 3, H, W) of images with alpha over a grey or a pattern (H, W), in fp32 at least."""
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    return (wide[:, :3] - background) * ((wide[:, 3:] + 1) / 2) + background
