"""Norms: the formula of Wu and He, in the dtype of the input with statistics in at least fp32."""

import pytest
import torch

from vae.ops.norm import group_norm, group_norm_silu

EPS = 1e-6


def plain(h, weight, bias, groups):
    """Mean and variance of each group of channels of each image, written out."""
    batch, channels = h.shape[:2]
    grouped = h.reshape(batch, groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return unit.reshape(h.shape) * weight.view(1, channels, 1, 1) + bias.view(1, channels, 1, 1)


def tensors(dtype=torch.float64, channels=12):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, channels, 5, 3), (channels,), (channels,))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("silu", [False, True])
def test_equals_the_formula_forward_and_backward(groups, silu):
    inputs = tensors()
    found = (group_norm_silu if silu else group_norm)(*inputs, groups, EPS)
    expected = plain(*inputs, groups)
    if silu:
        expected = expected / (1 + (-expected).exp())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    projection = torch.randn_like(found)
    mine = torch.autograd.grad((found * projection).sum(), inputs)
    theirs = torch.autograd.grad((expected * projection).sum(), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [group_norm, group_norm_silu])
def test_keeps_the_dtype_with_fp32_parameters(dtype, function):
    h, weight, bias = tensors(torch.float32)
    h = h.detach().to(dtype).requires_grad_()
    found = function(h, weight, bias, 4, EPS)
    assert found.dtype == dtype
    found.sum().backward()
    assert h.grad.dtype == dtype
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("function", [group_norm, group_norm_silu])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_statistics_of_bf16_are_at_least_fp32(function, layout):
    # A large group with a large mean: summed in bf16 the variance would be lost altogether.
    generator = torch.Generator().manual_seed(0)
    h = (20 + torch.randn(1, 8, 64, 64, generator=generator)).bfloat16()
    h = h.contiguous(memory_format=layout)
    ones, zeros = torch.ones(8), torch.zeros(8)
    exact = function(h.double(), ones.double(), zeros.double(), 2, EPS)
    found = function(h, ones, zeros, 2, EPS)
    assert (found.double() - exact).abs().max() < 2**-7 * exact.abs().max()  # two roundings to bf16
