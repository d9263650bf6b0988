"""Operations that take a picture in bands of rows are the same operations."""

from contextlib import contextmanager

import pytest
import torch

from tests.ops import test_fused_conv, test_resample, test_residual_block
from vae.ops import bands
from vae.ops.fused_conv import norm_silu_conv
from vae.ops.resample import downsample_conv, upsample_conv
from vae.ops.residual_block import residual_block

LAYOUTS = [torch.contiguous_format, torch.channels_last]
BANDS = [1, 100, 10**6]  # elements: a row at a time, a few rows, each image whole


@contextmanager
def in_bands(elements):
    """Every picture is large, and bands have so many elements."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(bands, "WHOLE_ELEMENTS", 0)
        patches.setattr(bands, "BAND_ELEMENTS", elements)
        yield


def with_layout(tensors, layout):
    return [t.detach().contiguous(memory_format=layout).requires_grad_() for t in tensors[:1]] + tensors[1:]


def assert_the_same(results, tensors, elements):
    whole = results(tensors)
    with in_bands(elements):
        found = results(tensors)
    for one, other in zip(found[:2], whole[:2], strict=True):  # the result and the input's gradient
        assert one.stride() == other.stride()
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*test_residual_block.SHAPES, (2, 16, 8, 9, 5), (1, 16, 4, 6, 7)])
def test_residual_block_in_bands(shape, layout, elements):
    # the last two are twice and four times as wide at their input: gradients share its gradient's room
    tensors = with_layout(test_residual_block.arguments(shape), layout)
    assert_the_same(lambda t: test_residual_block.with_gradients(residual_block, t), tensors, elements)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", test_fused_conv.SHAPES)
def test_norm_silu_conv_in_bands(shape, layout, elements):
    tensors = with_layout(test_fused_conv.arguments(shape), layout)
    assert_the_same(lambda t: test_fused_conv.with_gradients(norm_silu_conv, t), tensors, elements)


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [downsample_conv, upsample_conv])
@pytest.mark.parametrize(("shape", "out_channels"), [*test_resample.SHAPES, ((1, 3, 12, 8), 5)])
def test_resampling_in_bands(shape, out_channels, function, layout, elements):
    if function is downsample_conv and min(shape[2:]) < 2:
        pytest.skip("nothing is left of such a picture")
    tensors = with_layout(test_resample.tensors(shape, out_channels), layout)
    assert_the_same(lambda t: test_resample.results(function, t), tensors, elements)
