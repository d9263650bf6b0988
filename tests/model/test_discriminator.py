"""The discriminator has the shape of pix2pix's PatchGAN, its initial weights, and learns."""

import pytest
import torch
from torch import nn

from vae.model.discriminator import Discriminator


@pytest.mark.parametrize(("layers", "field"), [(1, 16), (2, 34), (3, 70)])
def test_receptive_field_matches_pix2pix(layers, field):
    # Isola et al. 2017, appendix 6.1.2: PatchGANs of 16, 34 and 70 px for one, two and three strided layers.
    # Norms spread each pixel to all positions, so the test disables them.
    model = Discriminator(4, layers).double()
    for norm in model.norms:
        norm.forward = lambda h: h
    side = 160
    images = torch.randn(1, 3, side, side, dtype=torch.float64, requires_grad=True)
    logits = model(images)
    middle = logits.shape[2] // 2
    (gradient,) = torch.autograd.grad(logits[0, 0, middle, middle], images)
    rows = gradient[0].abs().sum(0).sum(1).nonzero()
    assert rows.max() - rows.min() + 1 == field


def test_equals_a_plain_sequence_of_layers():
    torch.manual_seed(0)
    model = Discriminator(8, 2)
    stack = [model.convs[0], nn.LeakyReLU(0.2)]
    for conv, norm in zip(model.convs[1:], model.norms, strict=True):
        plain = nn.GroupNorm(norm.num_groups, norm.num_channels, eps=1e-6)
        plain.load_state_dict(norm.state_dict())
        stack += [conv, plain, nn.LeakyReLU(0.2)]
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(images), nn.Sequential(*stack, model.conv_out)(images))


def test_initial_weights_match_pix2pix():
    torch.manual_seed(0)
    weights = torch.cat([conv.weight.detach().flatten() for conv in Discriminator(32, 3).convs])
    assert float(weights.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(weights.mean())) < 1e-3
