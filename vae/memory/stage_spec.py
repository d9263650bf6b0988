"""The step of one stage of a run, as the planner counts it."""

import torch

from vae.config.options import Config
from vae.memory.plan import StepSpec


def stage_spec(
    config: Config, image_size: int, batch_size: int, dtype: torch.dtype, reserve: int, processes: int = 1
) -> StepSpec:
    """What decides the memory of a stage's step: crops of `image_size` px, `batch_size` of them per batch.

    `reserve`: bytes the device takes beside all tensors (vae.memory.available).
    """
    return StepSpec(
        model=config.model,
        loss=config.loss,
        image_size=image_size,
        batch=batch_size * config.run.accumulation_steps,
        dtype=dtype,
        channels_last=config.speed.channels_last,
        ema=config.optim.ema_decay > 0,
        processes=processes,
        train_part=config.optim.train_part,
        reserve=reserve,
    )
