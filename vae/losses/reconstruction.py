"""The per-pixel term: L1 or mean squared error.

Shapes: B images, C channels, H x W px.
"""

import torch
from torch import Tensor


def reconstruction_loss(recon: Tensor, images: Tensor, kind: str) -> Tensor:
    """Mean error of each image over its channels and pixels: (B, C, H, W) twice -> (B,).

    `kind` is "l1" (mean absolute) or "mse" (mean squared); values are in [-1, 1]. At least fp32 inside.
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} is not {tuple(images.shape)}"
    assert kind in ("l1", "mse"), kind
    dtype = torch.promote_types(
        recon.dtype, torch.float32
    )  # bf16 has 3 digits: too few for a mean of millions
    error = recon.to(dtype) - images.to(dtype)
    error = error.abs() if kind == "l1" else error.square()
    return error.flatten(1).mean(1)  # (B,)
