"""A second target of a new decoder: the images of the decoder that it replaces, of the same latents."""

from functools import partial

import torch

from vae.config.options import LossConfig
from vae.losses.reconstruction import reconstruction_loss
from vae.losses.terms import TermFunction


def build(loss: LossConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[str, TermFunction]:
    """The term of `teacher_weight` (vae/losses/terms.py)."""
    kind = loss.reconstruction_loss
    return f"{kind} to the teacher", partial(reconstruction_loss, kind=kind)
