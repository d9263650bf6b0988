"""GroupNorm equals the formula of Wu and He, in the input's dtype with statistics in at least fp32."""

import itertools

import pytest
import torch

from tests.harness.operations import LAYOUTS
from vae.memory.live_bytes import LiveBytes
from vae.ops import norm as norm_module
from vae.ops.norm import (
    Norm,
    group_norm,
    group_norm_reference,
    group_norm_silu,
    normalize,
    normalize_backward,
    normalize_with_statistics,
)

EPS = 1e-6


def tensors(dtype=torch.float64, channels=12):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, channels, 5, 3), (channels,), (channels,))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


@pytest.mark.parametrize("function", [group_norm, group_norm_silu])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_bf16_are_at_least_fp32(function, layout):
    # a large group with a large mean: sums in bf16 would lose the variance completely
    generator = torch.Generator().manual_seed(0)
    h = (20 + torch.randn(1, 8, 64, 64, generator=generator)).bfloat16()
    h = h.contiguous(memory_format=layout)
    ones, zeros = torch.ones(8), torch.zeros(8)
    exact = function(h.double(), ones.double(), zeros.double(), 2, EPS)
    found = function(h, ones, zeros, 2, EPS)
    assert (found.double() - exact).abs().max() < 2**-7 * exact.abs().max()  # two roundings to bf16


SHAPES = [((1, 4, 3, 5), 2), ((2, 12, 7, 1), 3), ((3, 6, 5, 9), 6), ((1, 10, 1, 2), 1), ((2, 96, 4, 3), 32)]
# Largest difference over largest value: statistics and sums are fp32; then each result is rounded once, and
# the gradient once more between SiLU and norm, as in autograd.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def results(function, inputs, grad, *rest):
    out = function(*inputs, *rest)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", [7, 64, 2**17])
def test_parts_equal_the_reference_in_every_precision(shape, groups, layout, part, monkeypatch):
    monkeypatch.setattr(norm_module, "CPU_PART_ELEMENTS", part)
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(s, generator=generator) for s in (shape, shape, shape[1], shape[1])]
    for (dtype, tolerance), silu in itertools.product(TOLERANCE.items(), (True, False)):
        h, grad = ((2 * t + 1).to(dtype).contiguous(memory_format=layout) for t in draw[:2])
        parameters = [t.to(torch.promote_types(dtype, torch.float32)) for t in draw[2:]]
        inputs = [t.detach().requires_grad_() for t in (h, *parameters)]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        found = results(group_norm_silu if silu else group_norm, inputs, grad, groups, EPS)
        expected = results(group_norm_reference, exact, grad.double(), groups, EPS, silu)
        assert found[0].stride() == found[1].stride() == h.stride()
        assert [each.dtype for each in found] == [dtype, *(each.dtype for each in inputs)]
        for mine, truth in zip(found, expected, strict=True):
            assert (mine.double() - truth).abs().max() < tolerance * max(1, truth.abs().max())


def test_reference_is_the_norm_of_pytorch():
    inputs = tensors()
    stock = torch.nn.functional.group_norm(inputs[0], 3, *inputs[1:], EPS)
    for silu, expected in ((False, stock), (True, torch.nn.functional.silu(stock))):
        found = group_norm_reference(*inputs, 3, EPS, silu)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_variance_is_exact_with_a_large_mean(layout):
    # variance 1 around 4096: E[x^2] - E[x]^2 would have no correct digit left in fp32
    h = 4096 + torch.randn(2, 6, 90, 70, generator=torch.Generator().manual_seed(0))
    norm = Norm(torch.ones(6), torch.zeros(6), 3, EPS)
    _, (mean, rstd) = normalize_with_statistics(h.contiguous(memory_format=layout), norm)
    exact = h.double().view(2, 3, -1)
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), 1 / exact.std(-1, correction=0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("part", [7, 2**17])
def test_bias_before_the_norm_is_added_and_the_gradient_may_overwrite(layout, silu, part, monkeypatch):
    monkeypatch.setattr(norm_module, "CPU_PART_ELEMENTS", part)
    h, weight, bias = tensors()
    h, h_bias = h.detach().contiguous(memory_format=layout), torch.linspace(-3, 3, len(bias)).double()
    inputs = [t.detach().requires_grad_() for t in (h, weight, bias, h_bias)]
    grad = torch.randn_like(h)
    expected = results(
        lambda h, weight, bias, h_bias: group_norm_reference(
            h + h_bias[:, None, None], weight, bias, 3, EPS, silu
        ),
        inputs,
        grad,
    )
    norm = Norm(weight.detach(), bias.detach(), 3, EPS, silu, h_bias)
    out, statistics = normalize_with_statistics(h, norm)
    found = out, *normalize_backward(grad, h, statistics, norm)
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-10, atol=1e-11)
    assert torch.equal(normalize(h, statistics, norm), out)
    skip = torch.randn_like(h)
    grad_h, *_, sums = normalize_backward(grad, h, statistics, norm, skip=skip)
    torch.testing.assert_close(grad_h, found[1] + skip, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(sums, skip.sum((0, 2, 3)), rtol=1e-10, atol=1e-11)
    grad = grad.contiguous(memory_format=layout)
    overwriting = normalize_backward(grad, h, statistics, norm, in_place=True)
    assert overwriting[0].data_ptr() == grad.data_ptr()
    for mine, truth in zip(overwriting, found[1:], strict=True):
        assert torch.equal(mine, truth)


def test_odd_strides_of_input_and_gradient():
    h, weight, bias = tensors()
    odd = h.detach().flip(3).transpose(2, 3)[:, :, ::2].requires_grad_()
    assert not odd.is_contiguous()
    grad = torch.randn(()).double().expand(odd.shape)
    found = results(group_norm_silu, [odd, weight, bias], grad, 3, EPS)
    expected = results(group_norm_reference, [odd, weight, bias], grad, 3, EPS, True)
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_allocates_only_results_and_partial_sums(layout):
    shape = (2, 64, 128, 128)
    h = torch.empty(shape, device="meta", dtype=torch.bfloat16).to(memory_format=layout).requires_grad_()
    weight, bias = (torch.empty(64, device="meta", requires_grad=True) for _ in range(2))
    with LiveBytes() as counter:
        out = group_norm_silu(h, weight, bias, 32, EPS)
    partial = 2**20  # of the split reduction: at most 1024 programs, 2 x 128 channels each, in fp32
    assert out.is_contiguous(memory_format=layout)
    assert out.nbytes < counter.peak < out.nbytes + partial + 2**12
    grad = torch.empty_like(out)
    with LiveBytes() as counter:
        torch.autograd.grad(out, [h, weight, bias], grad)
    assert h.nbytes < counter.peak < h.nbytes + partial + 2**12


def test_a_second_derivative_is_an_error():
    inputs = tensors()
    loss = group_norm_silu(*inputs, 4, EPS).square().sum()
    (grad,) = torch.autograd.grad(loss, inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
