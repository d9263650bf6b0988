"""The predicted memory of a step, compared with that of the real step on a CPU."""

from dataclasses import replace

import pytest
import torch

from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig, OptimConfig
from vae.losses.terms import build_terms
from vae.memory.live_bytes import LiveBytes
from vae.memory.plan import StepMemory, StepSpec, step_memory, zero_inputs
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.model.discriminator import Discriminator
from vae.optimizers import build_optimizers
from vae.step import Networks, compute_gradients, micro_batch_sizes
from vae.update import UpdateState, apply_update

MODEL = ModelConfig(channels=(16, 32), layers_per_block=1, norm_groups=4, z_channels=4)
PIXELS_ONLY = LossConfig(perceptual_weight=0.0)
SPEC = StepSpec(
    model=MODEL, loss=PIXELS_ONLY, image_size=64, batch=4, dtype=torch.float32, channels_last=False, ema=True
)


def measured(spec: StepSpec, micro_batch: int) -> tuple[int, int]:
    """Bytes on the CPU before the second step of a run, and the peak within it on top of them."""
    layout = torch.channels_last if spec.channels_last else torch.contiguous_format
    with LiveBytes() as counter:
        model = AutoencoderKL(spec.model).to(memory_format=layout)
        set_recompute(model, spec.recompute)
        ema = AutoencoderKL(spec.model) if spec.ema else None
        terms = build_terms(spec.loss, spec.dtype, "cpu")
        networks = Networks(model, None, terms, spec.dtype, spec.channels_last)
        if spec.loss.adversarial_weight:
            networks.discriminator = Discriminator(spec.loss.disc_channels, spec.loss.disc_layers)
            networks.discriminator.to(memory_format=layout)
        optimizers = build_optimizers(
            model, networks.discriminator, OptimConfig(optimizer=spec.optimizer), spec.loss
        )
        state = UpdateState.begin(torch.device("cpu"), fp16=False)
        inputs = replace(zero_inputs(spec, spec.batch, "cpu"), loss_scale=state.loss_scale)
        sizes = micro_batch_sizes(spec.batch, micro_batch)
        for _ in range(2):
            before = counter.peak = counter.current
            compute_gradients(networks, inputs, sizes)
            apply_update(optimizers.all, state, OptimConfig(), fp16=False, empty=False)
        assert ema is None or ema.config is spec.model
        return before, counter.peak - before


def check_prediction(
    spec: StepSpec, micro_batch: int, tolerance: float = 0.012, cpu_only: int = 0
) -> StepMemory:
    """Compare with the real step, less `cpu_only` bytes at its peak; returns the prediction."""
    predicted = step_memory(spec, micro_batch)
    resident, working = measured(spec, micro_batch)
    working -= cpu_only
    assert predicted.resident == pytest.approx(resident, rel=0.01)
    assert predicted.working == pytest.approx(working, rel=tolerance)
    assert predicted.total > 0.99 * (resident + working)
    return predicted
