"""Weight gradients in bands equal those of the whole convolution, for bands of every size."""

import pytest
import torch
import torch.nn.functional as F

from tests.harness.operations import (
    EPS,
    GROUPS,
    norm_silu_conv_inputs,
    residual_block_inputs,
    with_gradients,
)
from vae.ops import conv_gradients
from vae.ops.conv_gradients import conv_parameter_gradients, upsampled_conv_parameter_gradients
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference
from vae.ops.residual_block import residual_block, residual_block_reference


@pytest.fixture
def narrow_bands(monkeypatch):
    """Bands of one or two rows."""
    monkeypatch.setattr(conv_gradients, "WHOLE_PLANE_BYTES", 0)
    monkeypatch.setattr(conv_gradients, "BAND_BYTES", 1000)


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).contiguous(
        memory_format=torch.channels_last
    )


def expected_gradients(call, h, weight, grad_out):
    weight, bias = weight.clone().requires_grad_(), h.new_zeros(grad_out.shape[1]).requires_grad_()
    return torch.autograd.grad(call(h, weight, bias), (weight, bias), grad_out)


@pytest.mark.parametrize("shape", [(1, 4, 9, 7), (2, 3, 8, 6)])
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 1, (1, 1)), (3, 2, (0, 0)), (3, 1, (0, 1)), (5, 1, (2, 2))]
)
def test_convolution(narrow_bands, shape, size, stride, padding):
    h, weight = drawn(*shape), drawn(5, shape[1], size, size)
    grad = drawn(*F.conv2d(h, weight, None, stride, padding).shape)
    whole = expected_gradients(lambda *t: F.conv2d(*t, stride, padding), h, weight, grad)
    for result, expected in zip(
        conv_parameter_gradients(grad, h, weight, stride, padding), whole, strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_bands_are_activated_separately(narrow_bands):
    h, weight, grad = drawn(2, 3, 8, 6), drawn(5, 3, 3, 3), drawn(2, 5, 8, 6)
    seen = []

    def activation(rows, images):
        seen.append((images.start, rows.shape[2]))
        return F.silu(rows + 1)  # not zero at zero, but rows beyond the edges must stay zero

    whole = expected_gradients(lambda *t: F.conv2d(*t, padding=1), F.silu(h + 1), weight, grad)
    results = conv_parameter_gradients(grad, h, weight, padding=(1, 1), activation=activation)
    for result, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert {image for image, _ in seen} == {0, 1}
    assert max(rows for _, rows in seen) < 8


@pytest.mark.parametrize("shape", [(1, 4, 9, 7), (2, 3, 8, 6), (3, 2, 1, 5)])
def test_convolution_of_upsampled_images(shape):
    h, weight = drawn(*shape), drawn(5, shape[1], 3, 3)
    grad = drawn(shape[0], 5, 2 * shape[2], 2 * shape[3])
    whole = expected_gradients(
        lambda h, *t: F.conv2d(F.interpolate(h, scale_factor=2), *t, padding=1), h, weight, grad
    )
    for result, expected in zip(upsampled_conv_parameter_gradients(grad, h, weight), whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 8, 12, 7, 9), (3, 8, 8, 16, 6)])
@pytest.mark.parametrize(
    ("make_inputs", "operation", "reference"),
    [
        (
            norm_silu_conv_inputs,
            lambda *t: norm_silu_conv(*t, GROUPS, EPS),
            lambda *t: norm_silu_conv_reference(*t, GROUPS, EPS),
        ),
        (
            residual_block_inputs,
            lambda x, *t: residual_block(x, t, GROUPS, EPS),
            lambda x, *t: residual_block_reference(x, t, GROUPS, EPS),
        ),
    ],
    ids=["norm_silu_conv", "residual_block"],
)
def test_operations_with_activations_in_bands(narrow_bands, make_inputs, operation, reference, shape):
    inputs = make_inputs(shape, layout=torch.channels_last)
    for result, expected in zip(
        with_gradients(operation, inputs), with_gradients(reference, inputs), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-10)


def test_bf16_in_many_bands_is_as_exact_as_one_kernel(monkeypatch):
    h, grad = (drawn(1, 8, 160, 160).bfloat16() for _ in range(2))
    weight = drawn(8, 8, 3, 3)
    exact, _ = conv_parameter_gradients(grad.double(), h.double(), weight, padding=(1, 1))
    errors = []
    for plane in (2**30, 0):  # whole, then in bands
        monkeypatch.setattr(conv_gradients, "WHOLE_PLANE_BYTES", plane)
        monkeypatch.setattr(conv_gradients, "BAND_BYTES", 2**17)
        grad_weight, _ = conv_parameter_gradients(grad, h, weight, padding=(1, 1))
        errors.append((grad_weight.double() - exact).norm())
    assert errors[1] <= 1.1 * errors[0]


def test_two_by_two_kernels_are_only_for_channels_last():
    h, grad, weight = drawn(1, 2, 8, 8).contiguous(), drawn(1, 2, 16, 16).contiguous(), drawn(2, 2, 3, 3)
    assert upsampled_conv_parameter_gradients(grad, h, weight) is None
