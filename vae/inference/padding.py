"""Pictures of any size: sides padded to what the network divides by, and the padding cut off again.

Padding goes to the right and below, so that latents lie on the picture's own grid.
"""

import torch

LEAST_SIDE = 8  # px: below it a picture is smaller than what one latent pixel of this family stands for


def padded_side(side: int, multiple: int) -> int:
    """The next multiple of `multiple` that is not below `side`."""
    return -(-side // multiple) * multiple


def pad_to_multiple(images: torch.Tensor, multiple: int) -> torch.Tensor:
    """Images (B, 3, H, W) of any dtype, mirrored to the right and below up to multiples of `multiple`.

    Mirrored at the last pixel, not continued with it: a border of streaks has other statistics than the
    picture, and group norms carry statistics everywhere. Raises ValueError below LEAST_SIDE.
    """
    for dim in (2, 3):
        side = images.shape[dim]
        if side < LEAST_SIDE:
            raise ValueError(f"a side of {side} px is smaller than {LEAST_SIDE} px")
        padded = padded_side(side, multiple)
        if padded != side:
            images = images.index_select(dim, _mirrored(side, padded).to(images.device))
    return images


def crop_back(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The first (height, width) of images (B, C, H, W): what pad_to_multiple has added is gone."""
    return images[:, :, : size[0], : size[1]]


def _mirrored(side: int, padded: int) -> torch.Tensor:
    """Source index of each of `padded` positions: 0 .. side-1, then back, and forth again if need be."""
    period = 2 * (side - 1)
    index = torch.arange(padded) % period
    return torch.minimum(index, period - index)
