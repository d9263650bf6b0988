"""A complete checkpoint of a tiny model, without a training run."""

import copy
import functools
from typing import Any

import torch

from tests.harness.runs import TINY
from vae.config.options import build, flatten
from vae.training.schedule import WARM
from vae.training.stages import Stage
from vae.training.state import begin_state, checkpoint_content

TOPOLOGY = {"processes": 1, "batch_size": 4, "accumulation_steps": 1, "streams": 0, "shuffle_shards": None}
SAMPLES = {
    **{"training": {"version": "0" * 64}, "validation": None, "transform": {}, "continues": None},
    **{"seed": {"seed": 0, "rules": 1}, "topology": TOPOLOGY, "code": {"torch": "2", "revision": None}},
}
WITH_DISCRIMINATOR = {"adversarial_weight": 0.5, "disc_channels": 16, "disc_layers": 1}


def checkpoint(step: int = 1, **options: Any) -> dict[str, Any]:
    """The content of a checkpoint after `step` steps; all optimizers have made one."""
    content = copy.deepcopy(_checkpoint(tuple(options.items())))
    content["position"] |= {"step": step, "images": 4 * step, "epoch": 0, "images_in_epoch": 4 * step}
    return content


@functools.cache
def _checkpoint(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    given = {name: value for name, value in TINY.items() if name != "device"} | dict(options)
    config = build(given)
    torch.manual_seed(0)
    state = begin_state(config, torch.device("cpu"), fp16=False)
    for optimizer in state.optimizers.all:
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    state.stages = [Stage(0, 2, 32, 4)]
    return checkpoint_content(state, flatten(config), SAMPLES, WARM)
