"""Resampling equals its plain formulas, forward and backward, at odd sizes and in each dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.operations import LAYOUTS, RESAMPLE_SHAPES, conv_inputs, with_gradients
from vae.memory.live_bytes import LiveBytes
from vae.ops.fused_conv import (
    downsample_conv,
    downsample_conv_reference,
    upsample_conv,
    upsample_conv_reference,
)


def plain_downsample(h, weight, bias):
    """Explicit sums over the taps of an image padded by one row below and one column right."""
    batch, _, height, width = h.shape
    out = bias.view(1, -1, 1, 1).expand(batch, -1, height // 2, width // 2)
    padded = torch.cat([h, h.new_zeros(*h.shape[:3], 1)], 3)
    padded = torch.cat([padded, h.new_zeros(*padded.shape[:2], 1, padded.shape[3])], 2)
    for row in range(3):
        for column in range(3):
            taken = padded[:, :, row : row + 2 * (height // 2) : 2, column : column + 2 * (width // 2) : 2]
            out = out + torch.einsum("bchw,oc->bohw", taken, weight[:, :, row, column])
    return out


@pytest.mark.parametrize(("shape", "out_channels"), RESAMPLE_SHAPES)
def test_upsample_equals_its_reference_in_fp64(shape, out_channels):
    inputs = conv_inputs(shape, out_channels)
    for found, expected in zip(
        with_gradients(upsample_conv, inputs), with_gradients(upsample_conv_reference, inputs), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "out_channels"), RESAMPLE_SHAPES)
def test_upsample_reference_is_the_formula(shape, out_channels):
    h, weight, bias = conv_inputs(shape, out_channels)
    enlarged = h.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    torch.testing.assert_close(
        upsample_conv_reference(h, weight, bias), F.conv2d(enlarged, weight, bias, padding=1), rtol=0, atol=0
    )


# Folding adds up to four taps before the product instead of after it: a few roundings of the dtype, relative
# to the largest value. The fold is computed in the parameters' dtype, so only one rounding is to bf16.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_upsample_in_lower_precision(dtype, tolerance, layout):
    exact = conv_inputs((2, 16, 7, 5), 16)
    h, weight, bias = exact
    low = [
        h.detach().to(dtype).contiguous(memory_format=layout),
        weight.float().detach(),
        bias.float().detach(),
    ]
    for value in low:
        value.requires_grad_()
    expected = with_gradients(upsample_conv_reference, exact)
    found = with_gradients(upsample_conv, low)
    assert found[0].dtype == dtype
    assert [g.dtype for g in found[1:]] == [dtype, torch.float32, torch.float32]
    for mine, plain in zip(found, expected, strict=True):
        assert (mine.double() - plain).abs().max() < tolerance * plain.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [upsample_conv, downsample_conv])
def test_saves_only_its_input_and_the_weight(function, layout):
    # no upsampled or padded copy of the input, no folded or cast weight
    h, weight, bias = conv_inputs((1, 4, 8, 8), 4, torch.float32)
    h = h.detach().bfloat16().contiguous(memory_format=layout).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(h, weight, bias)
    assert {t.data_ptr() for t in saved} == {h.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [upsample_conv, downsample_conv])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layout_of_outputs_and_gradients(function, layout, dtype):
    inputs = conv_inputs((2, 3, 4, 6), 5, torch.float32)
    h, weight = (
        t.detach().to(dtype if t is inputs[0] else t.dtype).contiguous(memory_format=layout)
        for t in inputs[:2]
    )
    out, grad_h, grad_weight, _ = with_gradients(
        function, [h.requires_grad_(), weight.requires_grad_(), inputs[2]]
    )
    for found in (out, grad_h, grad_weight):
        assert found.is_contiguous(memory_format=layout)
    assert (grad_h.dtype, grad_weight.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("function", [upsample_conv, downsample_conv])
def test_gradcheck(function):
    assert torch.autograd.gradcheck(function, conv_inputs((2, 2, 4, 3), 3))


def counted(function, shape, out_channels):
    """Peak bytes and FLOPs of forward alone, then of forward and backward, on meta in bf16."""
    h = torch.empty(shape, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.empty(out_channels, shape[1], 3, 3, device="meta", requires_grad=True)
    bias = torch.empty(out_channels, device="meta", requires_grad=True)
    with LiveBytes() as counter, FlopCounterMode(display=False) as flops:
        out = function(h.requires_grad_(), weight, bias)
        forward = counter.peak, flops.get_total_flops()
        torch.autograd.grad(out, [h, weight, bias], torch.empty_like(out))
    return forward, (counter.peak, flops.get_total_flops())


def test_downsample_needs_no_padded_copy():
    (mine, _), (mine_both, _) = counted(downsample_conv, (1, 8, 256, 256), 8)
    (plain, _), (plain_both, _) = counted(downsample_conv_reference, (1, 8, 256, 256), 8)
    image = 8 * 256 * 256 * 2
    assert mine < 0.55 * image < 1.2 * image < plain
    assert mine_both < plain_both - 0.5 * image


def test_flops():
    (_, forward), (_, both) = counted(upsample_conv, (2, 8, 16, 16), 12)
    assert both == 3 * forward == 3 * 2 * (2 * 32 * 32) * 8 * 12 * 4  # four taps for each upsampled pixel
    (_, forward), (_, both) = counted(downsample_conv, (2, 8, 16, 16), 12)
    assert both == 3 * forward == 3 * 2 * (2 * 9 * 9) * 8 * 12 * 9  # one row and one column are dropped


@pytest.mark.parametrize(
    ("shape", "out_channels"),
    [((1, 3, 4, 6), 4), ((3, 2, 10, 2), 5), ((2, 4, 2, 14), 4), ((1, 2, 5, 7), 3), ((2, 1, 6, 3), 2)],
)
def test_downsample_equals_the_plain_formula(shape, out_channels):
    inputs = conv_inputs(shape, out_channels)
    for found, expected in zip(
        with_gradients(downsample_conv, inputs), with_gradients(plain_downsample, inputs), strict=True
    ):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    reference = downsample_conv_reference(*inputs)
    torch.testing.assert_close(reference, plain_downsample(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_downsample_in_lower_precision(dtype, tolerance):
    exact = conv_inputs((2, 8, 8, 6), 8)
    low = [exact[0].detach().to(dtype), *(v.detach().float() for v in exact[1:])]
    for value in low:
        value.requires_grad_()
    found = with_gradients(downsample_conv, low)
    assert found[0].dtype == dtype
    for mine, plain in zip(found, with_gradients(plain_downsample, exact), strict=True):
        assert (mine.double() - plain).abs().max() < tolerance * plain.abs().max()
