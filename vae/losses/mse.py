"""The mean squared error beside the per-pixel loss."""

from functools import partial

import torch

from vae.config.options import LossConfig
from vae.losses.reconstruction import reconstruction_loss
from vae.losses.terms import TermFunction


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `mse_weight` (vae/losses/terms.py)."""
    return "mse", partial(reconstruction_loss, kind="mse")
