"""The shapes that the kernels of a run are tested with are those that its steps have."""

from dataclasses import replace

import pytest
import torch

from tests.harness.runs import TINY
from vae.config.options import Config, ModelConfig
from vae.config.resolve import resolve
from vae.losses import feature_distance
from vae.losses.terms import build_terms
from vae.memory.plan import StepSpec, stage_spec, zero_inputs
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.ops import attention, norm
from vae.ops.kernel_check import AttentionShape, FeatureShape, NormShape, RmsShape
from vae.step import Networks, compute_gradients
from vae.training.precision import kernel_shapes

OPTIONS = {**TINY, "perceptual_weight": 1.0, "perceptual_net": "random", "channels": (8, 16, 24)}
ADVERSARIAL = {"adversarial_weight": 0.5, "disc_channels": 8, "disc_layers": 2}


WAN = ModelConfig(
    family="wan",
    channels=(8, 16, 24),
    layers_per_block=1,
    z_channels=4,
    use_quant_conv=True,
    latent_norm=True,
)


def spec_of(config: Config) -> StepSpec:
    return stage_spec(config, config.data.image_size, 1, torch.float32, 0)


@pytest.mark.parametrize("more", [{}, ADVERSARIAL, {"family": "wan"}], ids=["plain", "adversarial", "wan"])
def test_shapes_are_those_of_a_real_step(more, monkeypatch):
    """What the operations choose their kernels for, on a CPU."""
    config = resolve({**OPTIONS, **more}, None, None, {})
    if config.model.family == "wan":
        config = replace(config, model=WAN)
    found = set()

    def spy(module, shape_of, name="backend"):
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda h: found.add(shape_of(h)) or right(h))

    spy(norm, lambda h: (NormShape, *h.shape[1:]))
    spy(norm, lambda h: (RmsShape, *h.shape[1:]), "rms_backend")
    spy(attention, lambda q: (AttentionShape, *q.shape[1:]))
    spy(feature_distance, lambda h: (FeatureShape, *h.shape[1:]))
    loss, dtype = config.loss, torch.float32
    discriminator = None
    if loss.adversarial_weight:
        discriminator = Discriminator(loss.disc_channels, loss.disc_layers)
    terms = build_terms(loss, dtype, "cpu")
    networks = Networks(AutoencoderKL(config.model), discriminator, terms, dtype, channels_last=True)
    compute_gradients(networks, zero_inputs(spec_of(config), 1, "cpu"), [1])
    sizes = {NormShape: slice(3), RmsShape: slice(3), AttentionShape: slice(2), FeatureShape: slice(3)}
    planned = {(type(shape), *shape[sizes[type(shape)]]) for shape in kernel_shapes([spec_of(config)])}
    if config.model.family == "wan":  # the sum at the end of a block is tested at other sizes only
        found = {shape for shape in found if shape[0] is not NormShape}
    assert planned == found


def test_norms_of_a_residual_block_and_of_the_attention():
    config = resolve(OPTIONS, None, None, {})
    shapes = kernel_shapes([spec_of(config)])
    assert len(set(shapes)) == len(shapes)
    assert NormShape(8, 16, 16, 4, silu=True, has_h_bias=False) in shapes  # the first norm of a wider block
    assert NormShape(16, 16, 16, 4, silu=True, has_h_bias=True) in shapes
    assert NormShape(24, 8, 8, 4, silu=False, has_h_bias=False) in shapes
