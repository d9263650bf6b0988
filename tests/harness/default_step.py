"""The step of the default options on a card."""

import torch

from vae.config.options import Config
from vae.memory.plan import StepSpec, reserve_bytes, stage_spec


def default_spec(image_size: int, batch: int = 1) -> StepSpec:
    """The step behind the figures in the documentation: bf16, L1 + LPIPS + KL, EMA weights."""
    config = Config()
    return stage_spec(config, image_size, batch, torch.bfloat16, reserve_bytes(config, is_gpu=True))
