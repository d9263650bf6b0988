"""The RMS norm equals its formula, in the input's dtype and computed in at least fp32."""

import pytest
import torch

from tests.harness.operations import LAYOUTS
from vae.memory.live_bytes import LiveBytes
from vae.ops import norm as norm_module
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference
from vae.ops.norm import Norm, group_norm, group_norm_silu, normalize, normalize_backward, rms_norm_reference
from vae.ops.residual_block import residual_block, residual_block_reference

SHAPES = [(1, 4, 3, 5), (2, 12, 7, 1), (3, 6, 5, 9), (2, 96, 4, 3)]
# Largest difference over largest value: arithmetic is at least fp32, and each result is rounded once.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def results(function, inputs, grad):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_near(found, expected, tolerance):
    for mine, truth in zip(found, expected, strict=True):
        assert (mine.double() - truth).abs().max() < tolerance * max(1, truth.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("silu", [False, True])
def test_equals_the_reference_in_every_precision(shape, layout, silu, monkeypatch):
    function = group_norm_silu if silu else group_norm
    generator = torch.Generator().manual_seed(0)
    h, grad, weight = (torch.randn(s, generator=generator) for s in (shape, shape, shape[1]))
    for dtype, tolerance in TOLERANCE.items():
        parameter = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        features = (3 * h + 1).to(dtype).contiguous(memory_format=layout).requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in (features, parameter)]
        expected = results(lambda *t: rms_norm_reference(*t, silu), exact, grad.to(dtype).double())
        for part in (1, 64, 2**17):
            monkeypatch.setattr(norm_module, "CPU_PART_ELEMENTS", part)
            inputs = [features, parameter]
            found = results(lambda h, w: function(h, w, None, 0, 0.0), inputs, grad.to(dtype))
            assert found[0].stride() == found[1].stride() == features.stride()
            assert (found[0].dtype, found[2].dtype) == (dtype, parameter.dtype)
            assert_near(found, expected, tolerance)


def test_pixels_without_any_value_are_finite():
    h = torch.zeros(1, 4, 2, 2, requires_grad=True)
    out = group_norm_silu(h, torch.ones(4), None, 0, 0.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.autograd.grad(out.sum(), h)[0].isfinite().all()


def test_bias_is_added_before_the_norm_and_the_gradient_may_overwrite():
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 6, 5, 3), 6, 6)]
    inputs = [t.requires_grad_() for t in draws]
    grad = torch.randn(2, 6, 5, 3, generator=generator, dtype=torch.float64)
    expected = results(lambda h, w, b: rms_norm_reference(h + b[:, None, None], w, True), inputs, grad)
    h, weight, h_bias = (t.detach() for t in inputs)
    norm = Norm(weight, None, 0, 0.0, h_bias=h_bias)
    statistics = h.new_empty(0)
    skip = torch.randn_like(h)
    with_skip, *_, sums = normalize_backward(grad, h, statistics, norm, skip=skip)
    assert_near([with_skip, sums], [expected[1] + skip, skip.sum((0, 2, 3))], 1e-13)
    grad_h, grad_weight, _, grad_bias = normalize_backward(grad, h, statistics, norm, in_place=True)
    assert grad_h.data_ptr() == grad.data_ptr()
    found = [normalize(h, statistics, norm), grad_h, grad_weight, grad_bias]
    assert_near(found, expected, 1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_around_it_equal_their_references(layout):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 8, 5, 7), (8,), (12, 8, 3, 3), (12,), (12,), (12, 12, 3, 3), (12,), (12, 8, 1, 1), (12,)]
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    x, gamma1, weight1, bias1, gamma2, *rest = (t.requires_grad_() for t in draws)
    x = x.detach().contiguous(memory_format=layout).requires_grad_()
    inputs = [x, gamma1, weight1, bias1, gamma2, *rest]

    def block(function, *more):
        def call(x, gamma1, weight1, bias1, gamma2, *rest):
            return function(x, [gamma1, None, weight1, bias1, gamma2, None, *rest], 0, 0.0, *more)

        return call

    grad = torch.randn(2, 12, 5, 7, generator=generator, dtype=torch.float64)
    expected = results(block(residual_block_reference), inputs, grad)
    for recompute in ("none", "activations", "block"):
        assert_near(results(block(residual_block, recompute), inputs, grad), expected, 1e-12)

    def end(function):
        return lambda x, gamma, weight, bias: function(x, gamma, None, weight, bias, 0, 0.0)

    found, expected = (results(end(f), inputs[:4], grad) for f in (norm_silu_conv, norm_silu_conv_reference))
    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_allocates_only_results_and_partial_sums(layout):
    shape = (2, 96, 128, 128)
    h = torch.empty(shape, device="meta", dtype=torch.bfloat16).to(memory_format=layout).requires_grad_()
    weight = torch.empty(96, device="meta", requires_grad=True)
    with LiveBytes() as counter:
        out = group_norm_silu(h, weight, None, 0, 0.0)
    assert counter.peak == out.nbytes
    grad, partial = torch.empty_like(out), 512 * 96 * 4
    with LiveBytes() as counter:
        torch.autograd.grad(out, [h, weight], grad)
    assert h.nbytes < counter.peak <= h.nbytes + partial + 2**10
