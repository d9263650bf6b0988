"""The ladder: whatever is computed again, the whole step has the gradients of the plain formulas."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from tests.harness.operations import in_bands
from tests.harness.toy_networks import ALL_LOSSES, gradients, relative_difference, toy_inputs, toy_networks
from tests.test_step import plain_losses
from vae.config.options import RECOMPUTE, ModelConfig
from vae.model.autoencoder import AutoencoderKL
from vae.model.recompute import RECOMPUTE_LEVELS, set_recompute
from vae.ops.attention import attention_reference
from vae.ops.resample import upsample_conv_reference
from vae.step import compute_gradients

DEEP = ModelConfig(channels=(8, 8, 16), layers_per_block=2, norm_groups=4, z_channels=4)
SIZE = 16  # px: sides of 16, 8 and 4
RECOMPUTING = RECOMPUTE[1:]


@contextmanager
def plain_operations():
    """The network's layers call PyTorch's own operations, with autograd of their own."""
    with pytest.MonkeyPatch.context() as patches:
        layers = "vae.model.layers."
        patches.setattr(layers + "attention", attention_reference)
        patches.setattr(layers + "upsample_conv", upsample_conv_reference)
        patches.setattr(layers + "group_norm", plain_norm)
        patches.setattr(layers + "group_norm_silu", lambda *arguments: F.silu(plain_norm(*arguments)))
        yield


def plain_norm(h, weight, bias, groups, eps):
    return F.group_norm(h, groups, weight.to(h.dtype), bias.to(h.dtype), eps)


def networks_on(rung, **choices):
    nets = toy_networks(model=DEEP, **choices)
    set_recompute(nets.autoencoder, rung)
    return nets


def rung_gradients(rung, dtype=torch.float64, inputs=None, loss=ALL_LOSSES, channels_last=False):
    """Gradients of the autoencoder and the discriminator of one adversarial step on a rung."""
    nets = networks_on(rung, dtype=dtype, channels_last=channels_last)
    if channels_last:
        nets.autoencoder.to(memory_format=torch.channels_last)
    compute_gradients(nets, inputs or toy_inputs(4, SIZE, model=DEEP), [3, 1], loss)
    return gradients(nets.autoencoder), gradients(nets.discriminator)


@pytest.fixture(scope="module")
def exact():
    """Those of the plain formulas as one graph, fp64."""
    with plain_operations():
        nets = networks_on("none")
        losses = plain_losses(nets, toy_inputs(4, SIZE, model=DEEP), ALL_LOSSES)
    found = []
    for network, loss in zip((nets.autoencoder, nets.discriminator), losses, strict=True):
        names = dict(network.named_parameters())
        found.append(dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "channels_last"),
    [*((rung, False) for rung in RECOMPUTE), *((rung, True) for rung in ("none", "activations", "all"))],
)
def test_gradients_equal_plain_autograd_of_the_formulas(exact, rung, channels_last):
    for found, expected in zip(rung_gradients(rung, channels_last=channels_last), exact, strict=True):
        assert relative_difference(found, expected) < 1e-11  # fp64; other kernels, other order of sums


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["none", "activations", "all"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_of_images_in_bands_of_rows(exact, rung, channels_last):
    with in_bands(300):
        every = rung_gradients(rung, channels_last=channels_last)
    for found, expected in zip(every, exact, strict=True):
        assert relative_difference(found, expected) < 1e-11


# squared errors: the gradient of an absolute one jumps where a rounding changes its sign
SMOOTH = replace(ALL_LOSSES, reconstruction_loss="mse")


@cache
def smooth_gradients(seed):
    return rung_gradients("none", torch.float64, seeded_inputs(seed), SMOOTH)


def seeded_inputs(seed):
    inputs = toy_inputs(4, SIZE, model=DEEP)
    inputs.images.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return inputs


@pytest.mark.parametrize("rung", RECOMPUTE)
def test_gradients_in_fp32(rung):
    found = rung_gradients(rung, torch.float32, seeded_inputs(0), SMOOTH)
    for one, expected in zip(found, smooth_gradients(0), strict=True):
        assert relative_difference(one, expected) < 1e-5


def test_gradients_in_fp32_in_bands_of_rows():
    with in_bands(300):
        every = rung_gradients("all", torch.float32, seeded_inputs(0), SMOOTH, channels_last=True)
    for found, expected in zip(every, smooth_gradients(0), strict=True):
        assert relative_difference(found, expected) < 1e-5


@cache
def bf16_error(rung, plain=False):
    """Distance of bf16's gradients from fp64's, mean over three batches: one alone is luck."""
    errors = []
    for seed in range(3):
        with plain_operations() if plain else nullcontext():
            found = rung_gradients(rung, torch.bfloat16, seeded_inputs(seed), SMOOTH)
        pairs = zip(found, smooth_gradients(seed), strict=True)
        errors.append(sum(relative_difference(*pair) for pair in pairs))
    return sum(errors) / len(errors)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["none", "activations", "blocks", "all"])
def test_bf16_is_no_further_from_fp64_than_plain_bf16(rung):
    assert bf16_error(rung) <= 1.1 * bf16_error("none", plain=True)


@pytest.mark.slow
def test_bf16_in_bands_of_rows():
    with in_bands(300):
        found = bf16_error.__wrapped__("all")
    assert found <= 1.1 * bf16_error("none", plain=True)


@pytest.mark.parametrize("rung", RECOMPUTING)
@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 20, 12), (1, 4, 28)])
def test_odd_sizes_and_single_images(rung, shape):
    # sides that leave odd latents: 20 x 12 px are 5 x 3
    batch, height, width = shape
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64)
    results = []
    for name in ("none", rung):
        model = networks_on(name, perceptual=False, discriminator=False).autoencoder
        recon, mean, logvar = model(images)
        (recon.square().sum() + mean.sum() + logvar.sum()).backward()
        results.append(gradients(model))
    assert relative_difference(*results[::-1]) < 1e-11


@pytest.mark.parametrize("rung", RECOMPUTING)
def test_without_gradients_the_result_is_the_same(rung):
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        results = [
            networks_on(name, perceptual=False, discriminator=False).autoencoder(images)
            for name in ("none", rung)
        ]
    for found, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_encoder_takes_part_at_every_rung():
    results = []
    for rung in RECOMPUTE:
        nets = networks_on(rung)
        nets.autoencoder.freeze_encoder()
        compute_gradients(nets, toy_inputs(2, SIZE, model=DEEP), [2], ALL_LOSSES)
        results.append(gradients(nets.autoencoder))
    assert all(name.startswith(("decoder", "post_quant")) for name in results[0])
    for found in results[1:]:
        assert relative_difference(found, results[0]) < 1e-11


def test_a_rung_leaves_no_trace_of_another():
    def settings(model):
        names = ("recompute", "redone", "start_redone", "fused_out")
        return [getattr(module, name, None) for module in model.modules() for name in names]

    fresh = settings(AutoencoderKL(DEEP))
    seen = []
    for rung in RECOMPUTE:
        model = AutoencoderKL(DEEP)
        set_recompute(model, rung)
        assert settings(model) not in seen
        seen.append(settings(model))
        set_recompute(model, "none")
        assert settings(model) == fresh


def test_every_rung_of_the_option_is_there_and_names_stay():
    assert tuple(RECOMPUTE_LEVELS) == RECOMPUTE
    model = AutoencoderKL(DEEP)
    names = list(model.state_dict())
    set_recompute(model, "all")
    assert list(model.state_dict()) == names
