"""The per-pixel loss term: L1 or mean squared error."""

from functools import partial

import torch

from vae.config.options import LossConfig
from vae.losses.terms import TermFunction
from vae.ops.library import accumulation_dtype
from vae.ops.shapes import Images, PerImage


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `reconstruction_weight` (vae/losses/terms.py)."""
    return loss.reconstruction_loss, partial(reconstruction_loss, kind=loss.reconstruction_loss)


def reconstruction_loss(recon: Images, images: Images, kind: str) -> PerImage:
    """Mean error of each image over its channels and pixels, computed in fp32 at least.

    `kind` is "l1" (mean absolute) or "mse" (mean squared). Values are in [-1, 1].
    """
    assert recon.shape == images.shape, f"{tuple(recon.shape)} differs from {tuple(images.shape)}"
    assert kind in ("l1", "mse"), kind
    # fp32: the 3 digits of bf16 are too few for a mean over millions of values
    dtype = accumulation_dtype(recon)
    error = recon.to(dtype) - images.to(dtype)
    error = error.abs() if kind == "l1" else error.square()
    return error.flatten(1).mean(1)
