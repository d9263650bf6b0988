"""--padding reflect: as PyTorch pads, in the network, in every recompute level, and in tiles."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.harness.vae_families import diffusers_model, image
from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.model.layers import readout, reflected

SHAPE = ModelConfig(
    channels=(8, 16), layers_per_block=1, norm_groups=4, z_channels=4, use_quant_conv=True, padding="reflect"
)


def network(shape: ModelConfig = SHAPE) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(shape).double()


def test_border_is_that_of_pytorch():
    h = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    assert torch.equal(reflected(h), nn.functional.pad(h, (1, 1, 1, 1), mode="reflect"))
    assert reflected(h).is_contiguous(memory_format=torch.channels_last)


def test_network_equals_diffusers_with_the_padding_of_eq_vae():
    """The lines of EQ-VAE's model card, on a model of diffusers: every convolution that pads by itself."""
    theirs = diffusers_model("sd", (32, 64), 1)
    for module in theirs.modules():
        if isinstance(module, nn.Conv2d) and module.padding != (0, 0):
            module.padding_mode = "reflect"
            module._reversed_padding_repeated_twice = [1, 1, 1, 1]
    ours = AutoencoderKL(replace(SHAPE, channels=(32, 64), norm_groups=32))
    ours.load_state_dict(theirs.state_dict())
    expected = theirs(image()).sample
    assert (ours(image())[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    zeros = AutoencoderKL(replace(ours.config, padding="zeros"))
    zeros.load_state_dict(theirs.state_dict())
    difference = (zeros(image())[0] - expected).abs().amax(dim=(0, 1))
    assert difference.max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("level", RECOMPUTE)
def test_recompute_levels_give_the_same_gradients(level):
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    gradients = []
    for name in ("none", level):
        model = network()
        set_recompute(model, name)
        model(images)[0].square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_ends_are_computed_in_fp32_and_rounded_once():
    decoder, h = network().float().decoder, torch.randn(1, 8, 9, 9).bfloat16()
    expected = readout(decoder.conv_norm_out, decoder.conv_out, h.float()).bfloat16()
    assert torch.equal(readout(decoder.conv_norm_out, decoder.conv_out, h), expected)
