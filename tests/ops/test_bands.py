"""Operations compute the same in bands of rows as on whole images."""

import pytest
import torch
import torch.nn.functional as F

from tests.harness.operations import (
    EPS,
    GROUPS,
    LAYOUTS,
    NORM_SILU_CONV_SHAPES,
    RESAMPLE_SHAPES,
    RESIDUAL_BLOCK_SHAPES,
    conv_inputs,
    in_bands,
    in_layout,
    norm_silu_conv_inputs,
    residual_block_inputs,
    with_gradients,
)
from vae.memory.live_bytes import LiveBytes
from vae.ops.fused_conv import norm_silu_conv, same_conv
from vae.ops.resample import downsample_conv, upsample_conv
from vae.ops.residual_block import residual_block

RESAMPLED = [  # half a row or column would be empty
    (function, shape, out_channels)
    for function, least in ((downsample_conv, 2), (upsample_conv, 1))
    for shape, out_channels in [*RESAMPLE_SHAPES, ((1, 3, 12, 8), 5)]
    if min(shape[2:]) >= least
]
BANDS = [1, 100, 10**6]  # elements: one row per band, a few rows, each image whole


def assert_same_in_bands(function, inputs, elements):
    whole = with_gradients(function, inputs)
    with in_bands(elements):
        results = with_gradients(function, inputs)
    for result, expected in zip(results[:2], whole[:2], strict=True):  # the output and the input's gradient
        assert result.stride() == expected.stride()
    for result, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*RESIDUAL_BLOCK_SHAPES, (2, 16, 8, 9, 5), (1, 16, 4, 6, 7)])
def test_residual_block_in_bands(shape, layout, elements):
    # the last two have two and four times as many input as output channels: gradients share a buffer
    inputs = residual_block_inputs(shape, layout=layout)
    assert_same_in_bands(lambda x, *rest: residual_block(x, rest, GROUPS, EPS), inputs, elements)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", NORM_SILU_CONV_SHAPES)
def test_norm_silu_conv_in_bands(shape, layout, elements):
    inputs = norm_silu_conv_inputs(shape, layout=layout)
    assert_same_in_bands(lambda *tensors: norm_silu_conv(*tensors, GROUPS, EPS), inputs, elements)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("function", "shape", "out_channels"), RESAMPLED)
def test_resampling_in_bands(function, shape, out_channels, layout, elements):
    assert_same_in_bands(function, in_layout(conv_inputs(shape, out_channels), layout), elements)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES)
def test_same_conv_in_bands(shape, layout, elements):
    batch, width, out, height, side = shape
    inputs = in_layout(conv_inputs((batch, width, height, side), out), layout)
    whole = with_gradients(lambda *tensors: F.conv2d(*tensors, padding=1), inputs)
    with in_bands(elements):
        results = with_gradients(same_conv, inputs)
    for result, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_block_that_halves_its_width_allocates_one_gradient():
    x, *parameters = residual_block_inputs((1, 64, 32, 256, 256), dtype=torch.float32, device="meta")
    with in_bands(2**16):
        out = residual_block(x, parameters, GROUPS, EPS)
        grad_out = torch.empty_like(out)
        with LiveBytes() as counter:
            torch.autograd.grad(out, [x, *parameters], grad_out)
    assert counter.peak <= 1.15 * x.nbytes  # in addition: bands, and the gradients of the weights
