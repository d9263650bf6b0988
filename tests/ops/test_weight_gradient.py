"""Weight gradients in bands: those of the whole convolution, whatever the bands."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops import test_fused_conv, test_residual_block
from vae.ops import weight_gradient
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference
from vae.ops.residual_block import residual_block, residual_block_reference
from vae.ops.weight_gradient import conv_weight_gradient, upsampled_conv_weight_gradient

OPERATIONS = {
    test_fused_conv: (norm_silu_conv, norm_silu_conv_reference),
    test_residual_block: (residual_block, residual_block_reference),
}


@pytest.fixture
def narrow_bands(monkeypatch):
    """One to two rows at a time."""
    monkeypatch.setattr(weight_gradient, "WHOLE_PLANE_BYTES", 0)
    monkeypatch.setattr(weight_gradient, "BAND_BYTES", 1000)


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).contiguous(
        memory_format=torch.channels_last
    )


def expected(call, h, weight, grad_of):
    weight, bias = weight.clone().requires_grad_(), h.new_zeros(grad_of.shape[1]).requires_grad_()
    return torch.autograd.grad(call(h, weight, bias), (weight, bias), grad_of)


@pytest.mark.parametrize("shape", [(1, 4, 9, 7), (2, 3, 8, 6)])
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 1, (1, 1)), (3, 2, (0, 0)), (3, 1, (0, 1)), (5, 1, (2, 2))]
)
def test_a_convolution(narrow_bands, shape, size, stride, padding):
    h, weight = drawn(*shape), drawn(5, shape[1], size, size)
    grad = drawn(*F.conv2d(h, weight, None, stride, padding).shape)
    whole = expected(lambda *t: F.conv2d(*t, stride, padding), h, weight, grad)
    for mine, truth in zip(conv_weight_gradient(grad, h, weight, stride, padding), whole, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)


def test_bands_are_activated_one_by_one(narrow_bands):
    h, weight, grad = drawn(2, 3, 8, 6), drawn(5, 3, 3, 3), drawn(2, 5, 8, 6)
    seen = []

    def activation(rows, images):
        seen.append((images.start, rows.shape[2]))
        return F.silu(rows + 1)  # not zero at zero: rows beyond the edges stay zero all the same

    whole = expected(lambda *t: F.conv2d(*t, padding=1), F.silu(h + 1), weight, grad)
    found = conv_weight_gradient(grad, h, weight, padding=(1, 1), activation=activation)
    for mine, truth in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
    assert {image for image, _ in seen} == {0, 1}
    assert max(rows for _, rows in seen) < 8


@pytest.mark.parametrize("shape", [(1, 4, 9, 7), (2, 3, 8, 6), (3, 2, 1, 5)])
def test_a_convolution_of_enlarged_images(shape):
    h, weight = drawn(*shape), drawn(5, shape[1], 3, 3)
    grad = drawn(shape[0], 5, 2 * shape[2], 2 * shape[3])
    whole = expected(lambda h, *t: F.conv2d(F.interpolate(h, scale_factor=2), *t, padding=1), h, weight, grad)
    for mine, truth in zip(upsampled_conv_weight_gradient(grad, h, weight), whole, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 8, 12, 7, 9), (3, 8, 8, 16, 6)])
@pytest.mark.parametrize("module", [test_fused_conv, test_residual_block])
def test_operations_whose_activations_are_made_in_bands(narrow_bands, module, shape):
    operation, reference = OPERATIONS[module]
    tensors = module.arguments(shape, channels_last=True)
    found = module.with_gradients(operation, tensors)
    for one, other in zip(found, module.with_gradients(reference, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)


def test_many_bands_of_bf16_are_no_less_exact_than_one_kernel(monkeypatch):
    h, grad = (drawn(1, 8, 160, 160).bfloat16() for _ in range(2))
    weight = drawn(8, 8, 3, 3)
    exact, _ = conv_weight_gradient(grad.double(), h.double(), weight, padding=(1, 1))
    errors = []
    for plane in (2**30, 0):  # whole, then in bands
        monkeypatch.setattr(weight_gradient, "WHOLE_PLANE_BYTES", plane)
        monkeypatch.setattr(weight_gradient, "BAND_BYTES", 2**17)
        found, _ = conv_weight_gradient(grad, h, weight, padding=(1, 1))
        errors.append((found.double() - exact).norm())
    assert errors[1] <= 1.1 * errors[0]


def test_two_by_two_kernels_are_for_rows_that_lie_together():
    h, grad, weight = drawn(1, 2, 8, 8).contiguous(), drawn(1, 2, 16, 16).contiguous(), drawn(2, 2, 3, 3)
    assert upsampled_conv_weight_gradient(grad, h, weight) is None
