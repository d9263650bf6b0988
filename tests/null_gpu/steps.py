"""Optimizer steps on the null GPU as the trainer makes them: a child process runs cases and prints JSON.

The networks begin with zeros, which nothing reads, and are kept from one case to the next if they are equal.
"""

import contextlib
import copy
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vae.system.gpus import set_gpu_memory_variables

set_gpu_memory_variables()  # before PyTorch is imported, as every script does

import torch  # noqa: E402

from tests.null_gpu.counters import Counters, peak_bytes, reset_peak, set_limit  # noqa: E402
from vae.config.options import Config  # noqa: E402
from vae.config.recipes import recipe_values  # noqa: E402
from vae.config.resolve import resolve  # noqa: E402
from vae.losses.terms import build_terms  # noqa: E402
from vae.memory.available import available_bytes, limit_memory  # noqa: E402
from vae.memory.plan import (  # noqa: E402
    StepMemory,
    StepSpec,
    choose_step,
    reserve_bytes,
    stage_spec,
    step_memory,
    zero_inputs,
)
from vae.memory.plan_table import DRIVER_AND_CONTEXT_GIB  # noqa: E402
from vae.model.activation_scale import scale_activations  # noqa: E402
from vae.model.autoencoder import AutoencoderKL, set_recompute  # noqa: E402
from vae.model.diffusers_autoencoder import build_autoencoder  # noqa: E402
from vae.model.discriminator import Discriminator  # noqa: E402
from vae.ops.library import KERNEL_KEYS, REPLACED  # noqa: E402
from vae.optimizers import build_optimizers  # noqa: E402
from vae.step import Networks, StepInputs  # noqa: E402
from vae.system.gpus import find_cards  # noqa: E402
from vae.system.host import GIB  # noqa: E402
from vae.system.script import end_process  # noqa: E402
from vae.training.cuda_graph import StepGraph  # noqa: E402
from vae.training.distributed import Distributed  # noqa: E402
from vae.training.precision import set_backends  # noqa: E402
from vae.training.stage_memory import OomRetry, StepSettings  # noqa: E402
from vae.update import UpdateState, apply_update  # noqa: E402

DEVICE = torch.device("cuda", 0)
RTX_5090_GIB = find_cards("RTX 5090")[0].vram_gib - DRIVER_AND_CONTEXT_GIB


@dataclass(frozen=True)
class Case:
    """What the steps compute, and with which settings they begin."""

    options: dict[str, Any] = field(default_factory=dict)  # values of train_vae.py's flags, over the profile
    vae: dict[str, Any] | None = None  # the shape in a file of --init_from
    profile: str | None = None
    dtype: str = "bfloat16"
    micro_batch: str = "1"
    recompute: str = "none"
    may_recompute_more: bool = False  # --recompute auto
    gib: float = RTX_5090_GIB  # memory of the card
    steps: int = 3
    graph: bool = False  # --cuda_graph
    workspace_mib: int = 256  # of each convolution: cuDNN's choices need at most 164
    disc_start: int = 0  # the first step with the adversarial loss, if it has a weight
    activation_scale: float = 1.0  # vae/model/activation_scale.py


@dataclass
class Built:
    """Networks of a configuration, and what an update changes."""

    autoencoder: AutoencoderKL
    ema: AutoencoderKL
    networks: Networks
    optimizers: list[torch.optim.Optimizer]
    update: UpdateState


def build(config: Config, dtype: torch.dtype) -> Built:
    """The networks and optimizers of vae.training.state, without initial weights."""
    discriminator = None
    with torch.device("meta"):
        autoencoder = build_autoencoder(config.model)
        if config.loss.adversarial_weight > 0:
            discriminator = Discriminator(config.loss.disc_channels, config.loss.disc_layers)
    layout = torch.channels_last if config.speed.channels_last else torch.contiguous_format
    for network in filter(None, (autoencoder, discriminator)):
        network.to_empty(device=DEVICE).to(memory_format=layout)
    if config.optim.train_part == "decoder":
        autoencoder.freeze_encoder()
    terms = build_terms(config.loss, dtype, "meta")
    for network in terms.networks():
        network.to_empty(device=DEVICE).requires_grad_(False)
    networks = Networks(autoencoder, discriminator, terms, dtype, config.speed.channels_last)
    optimizers = build_optimizers(autoencoder, discriminator, config.optim, config.loss).all
    update = UpdateState.begin(DEVICE, fp16=dtype == torch.float16)
    return Built(autoencoder, copy.deepcopy(autoencoder).requires_grad_(False), networks, optimizers, update)


def run_case(case: Case, config: Config, built: Built) -> dict[str, Any]:
    """Counts of the last step, peaks of all steps but the first, and the settings at the end."""
    torch.cuda.empty_cache()
    set_limit(int(case.gib * GIB))
    available = int(available_bytes(DEVICE) * config.speed.vram_margin)
    memory = _plan(case, config, available)
    limit_memory(DEVICE, available)
    set_recompute(built.autoencoder, memory.recompute)
    scale_activations(built.autoencoder, case.activation_scale)
    graph = StepGraph() if case.graph else None
    settings = StepSettings(memory.micro_batch, memory.recompute, case.may_recompute_more, graph)
    spec = _spec(case, config)
    inputs = replace(zero_inputs(spec, spec.batch, DEVICE), loss_scale=built.update.loss_scale)
    without_discriminator = replace(inputs, adversarial_factor=None)
    torch.cuda.reset_accumulated_memory_stats()
    counts, retries, host_ms = [], [], 0.0
    for step in range(case.steps):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
            reset_peak()
        before, started = Counters.now(), time.process_time()
        _step(config, built, inputs if step >= case.disc_start else without_discriminator, settings)
        host_ms = (time.process_time() - started) * 1e3
        counts.append(asdict(Counters.now().since(before)))
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
    return {
        "host_ms": host_ms,
        "counts": counts[-1],
        "counted_gib": (memory.resident + memory.working) / GIB,
        "needed_gib": memory.total / GIB,
        "predicted_gib": memory.predicted(available) / GIB,
        "available_gib": available / GIB,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "device_gib": peak_bytes() / GIB,
        "retries": retries[-1] - retries[-2] if case.steps > 1 else 0,  # in the last step
        "micro_batch": settings.micro_batch,
        "recompute": settings.recompute,
        "lowered": (settings.micro_batch, settings.recompute) != (memory.micro_batch, memory.recompute),
    }


def _plan(case: Case, config: Config, available: int) -> StepMemory:
    """The plan of the trainer for "auto"; the settings of the case otherwise."""
    spec = _spec(case, config)
    if case.micro_batch == "auto":
        return choose_step(spec, available, "auto", case.recompute)
    return step_memory(replace(spec, recompute=case.recompute), int(case.micro_batch))


def _spec(case: Case, config: Config) -> StepSpec:
    size, batch, dtype = config.data.image_size, config.run.batch_size, getattr(torch, case.dtype)
    spec = stage_spec(config, size, batch, dtype, reserve_bytes(config, is_gpu=True))
    return replace(spec, activation_scale=case.activation_scale)


def _step(config: Config, built: Built, inputs: StepInputs, settings: StepSettings) -> None:
    dist, size = Distributed(0, 1, DEVICE), config.data.image_size
    OomRetry(built.networks, dist, settings, Path("run"), size).gradients(inputs)
    fp16 = built.networks.dtype == torch.float16
    optimizers = built.optimizers if inputs.adversarial_factor is not None else built.optimizers[:1]
    apply_update(optimizers, built.update, config.optim, fp16, empty=False)
    with torch.no_grad():
        ema, weights = list(built.ema.parameters()), list(built.autoencoder.parameters())
        torch._foreach_lerp_(ema, weights, 0.001)


def main(cases: list[Case]) -> None:
    """Run the cases; each prints one JSON object."""
    # Triton compiles only the kernels for bf16: each takes half a second, and there are more than a hundred
    never = {key for key in KERNEL_KEYS if key.dtype != torch.bfloat16}
    built: tuple[object, Built] | None = None
    for case in cases:
        os.environ["NULL_GPU_WORKSPACES_MIB"] = str(case.workspace_mib)
        recipe = recipe_values(case.profile, has_gpu=True) if case.profile else None
        config = resolve(case.options, None, recipe, {}, vae=case.vae)
        set_backends(config.speed)
        REPLACED.clear()
        REPLACED.update(KERNEL_KEYS if config.speed.kernels == "torch" else never)
        key = (config.model, config.loss, config.optim, case.dtype, config.speed.channels_last)
        if built is None or built[0] != key:
            built = None
            gc.collect()
            torch.cuda.empty_cache()  # or the new networks lie in pieces of large segments
            built = key, build(config, getattr(torch, case.dtype))
        with contextlib.redirect_stdout(sys.stderr):  # lines of the trainer
            found = run_case(case, config, built[1])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main([Case(**given) for given in json.loads(sys.argv[1])])
    end_process(0)
