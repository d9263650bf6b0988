"""Operations that take an image in bands of rows are the same operations."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from tests.ops import test_fused_conv, test_resample, test_residual_block
from vae.memory import live_bytes
from vae.memory.live_bytes import LiveBytes
from vae.ops import bands
from vae.ops.fused_conv import norm_silu_conv, same_conv
from vae.ops.resample import downsample_conv, upsample_conv
from vae.ops.residual_block import residual_block

LAYOUTS = [torch.contiguous_format, torch.channels_last]
RESAMPLED = [  # nothing would be left of half a row or column
    (function, shape, out_channels)
    for function, least in ((downsample_conv, 2), (upsample_conv, 1))
    for shape, out_channels in [*test_resample.SHAPES, ((1, 3, 12, 8), 5)]
    if min(shape[2:]) >= least
]
BANDS = [1, 100, 10**6]  # elements: a row at a time, a few rows, each image whole


@contextmanager
def in_bands(elements):
    """Every image is large, and bands have so many elements."""
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
@pytest.mark.parametrize(("function", "shape", "out_channels"), RESAMPLED)
def test_resampling_in_bands(function, shape, out_channels, layout, elements):
    tensors = with_layout(test_resample.tensors(shape, out_channels), layout)
    assert_the_same(lambda t: test_resample.results(function, t), tensors, elements)


def conv_arguments(shape, dtype=torch.float64, device="cpu"):
    """Seeded h (B, C, H, W) and the parameters of a 3x3 convolution to C' channels, with gradient."""
    batch, width, out, height, side = shape
    sizes = [(batch, width, height, side), (out, width, 3, 3), (out,)]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [t.to(device, dtype).requires_grad_() for t in found]


@pytest.mark.parametrize("elements", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", test_residual_block.SHAPES)
def test_plain_convolution_in_bands(shape, layout, elements):
    tensors = with_layout(conv_arguments(shape), layout)
    whole = test_resample.results(lambda *t: F.conv2d(*t, padding=1), tensors)
    with in_bands(elements):
        found = test_resample.results(same_conv, tensors)
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_block_that_halves_its_width_needs_room_for_one_gradient():
    x, *parameters = test_residual_block.arguments((1, 64, 32, 256, 256), torch.float32, device="meta")
    layers = test_residual_block.GROUPS, test_residual_block.EPS
    with in_bands(2**16), pytest.MonkeyPatch.context() as patches:
        patches.setattr(live_bytes, "_COUNTED", {})
        out = residual_block(x, parameters, *layers)
        grad_out = torch.empty_like(out)
        with LiveBytes() as counter:
            torch.autograd.grad(out, [x, *parameters], grad_out)
    assert counter.peak <= 1.15 * x.nbytes  # bands beside it, and the gradients of the weights
