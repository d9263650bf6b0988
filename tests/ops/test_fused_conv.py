"""Convolutions as operations: exact, in the input's dtype, and saving little for backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.operations import (
    EPS,
    GROUPS,
    LAYOUTS,
    NORM_SILU_CONV_SHAPES,
    RESAMPLE_SHAPES,
    conv_inputs,
    norm_silu_conv_inputs,
    relative_error,
    with_gradients,
)
from vae.memory.live_bytes import LiveBytes
from vae.ops import fused_conv
from vae.ops.fused_conv import (
    downsample_conv,
    downsample_conv_reference,
    end_dtype,
    norm_silu_conv,
    norm_silu_conv_reference,
    same_conv,
    upsample_conv,
    upsample_conv_reference,
)


def same_conv_reference(h, weight, bias):
    """The same convolution in PyTorch; autograd casts the weights."""
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=weight.shape[2] // 2)


SAME_SHAPES = [((1, 4, 7, 9), 6, 3), ((2, 3, 1, 5), 4, 3), ((3, 5, 8, 6), 2, 1)]  # (B, C, H, W), C', kernel
DOWN_SHAPES = [((1, 3, 4, 6), 4), ((3, 2, 10, 2), 5), ((1, 2, 5, 7), 3), ((2, 1, 6, 3), 2)]
CONVS = [
    (same_conv, same_conv_reference, SAME_SHAPES),
    (downsample_conv, downsample_conv_reference, DOWN_SHAPES),
    (upsample_conv, upsample_conv_reference, RESAMPLE_SHAPES),
]


def mixed_inputs(shape, out_channels, *size, dtype=torch.float64, layout=torch.contiguous_format):
    """h in `dtype`, weight and bias in at least fp32, with gradient."""
    inputs = conv_inputs(shape, out_channels, torch.float64, *size)
    h, weight, bias = (t.detach().to(torch.promote_types(dtype, torch.float32)) for t in inputs)
    h, weight = h.to(dtype, memory_format=layout), weight.contiguous(memory_format=layout)
    return [t.requires_grad_() for t in (h, weight, bias)]


@pytest.mark.parametrize(("function", "reference", "shapes"), CONVS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_equal_their_references(function, reference, shapes, layout):
    for shape in shapes:
        inputs = mixed_inputs(*shape, layout=layout)
        found, expected = with_gradients(function, inputs), with_gradients(reference, inputs)
        for result, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


# Of upsampling, folding adds up to four taps before the product instead of after it: a few roundings of the
# dtype, relative to the largest value. The fold is computed in the parameters' dtype.
@pytest.mark.parametrize(("function", "reference", "shapes"), CONVS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_in_lower_precision(function, reference, shapes, dtype, tolerance, layout):
    exact = with_gradients(reference, mixed_inputs((2, 16, 8, 6), 16))
    found = with_gradients(function, mixed_inputs((2, 16, 8, 6), 16, dtype=dtype, layout=layout))
    assert [t.dtype for t in found] == [dtype, dtype, torch.float32, torch.float32]
    assert all(t.is_contiguous(memory_format=layout) for t in found[:3])
    for mine, plain in zip(found, exact, strict=True):
        assert (mine.double() - plain).abs().max() < tolerance * plain.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [same_conv, upsample_conv, downsample_conv])
def test_convolutions_save_only_their_input_and_the_weight(function, layout):
    # no upsampled or padded copy of the input, no folded or cast weight
    h, weight, bias = mixed_inputs((1, 4, 8, 8), 4, dtype=torch.bfloat16, layout=layout)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(h, weight, bias)
    assert {t.data_ptr() for t in saved if t.numel()} == {h.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize(("frozen", "products"), [((), 3), ((0,), 2), ((1, 2), 2), ((1,), 3)])
def test_unwanted_gradients_are_not_computed(frozen, products):
    inputs = mixed_inputs((1, 4, 16, 16), 6, 3)
    wanted = [t for index, t in enumerate(inputs) if index not in frozen]
    for index in frozen:
        inputs[index].requires_grad_(False)
    grads = torch.autograd.grad(same_conv(*inputs).sum(), wanted)
    expected = torch.autograd.grad(same_conv_reference(*inputs).sum(), wanted)
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-12, atol=1e-12)

    on_meta = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in inputs]
    with LiveBytes() as counter:
        same_conv(*on_meta).sum().backward()
    assert counter.flops == products * 2 * 16 * 16 * 4 * 6 * 9


def operation(*tensors):
    return norm_silu_conv(*tensors, GROUPS, EPS)


def reference(*tensors):
    return norm_silu_conv_reference(*tensors, GROUPS, EPS)


@pytest.mark.parametrize("shape", NORM_SILU_CONV_SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_reference(shape, layout):
    inputs = norm_silu_conv_inputs(shape, layout=layout)
    for result, expected in zip(
        with_gradients(operation, inputs), with_gradients(reference, inputs), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", NORM_SILU_CONV_SHAPES)
def test_bf16_with_fp32_weights_is_as_close_to_fp64_as_plain_bf16(shape):
    exact = with_gradients(reference, norm_silu_conv_inputs(shape))
    inputs = norm_silu_conv_inputs(shape, dtype=torch.bfloat16, weights_dtype=torch.float32)
    results = with_gradients(operation, inputs)
    plain = with_gradients(reference, inputs)
    assert [t.dtype for t in results] == [torch.bfloat16] * 2 + [torch.float32] * 4
    assert relative_error(results, exact) <= 1.1 * relative_error(plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_after_bf16_the_ends_of_the_network_are_finer_than_bf16(dtype, monkeypatch):
    """At the warm start, a mean of 2.4 times weights of either sign cancels. A GPU computes it in fp16."""
    monkeypatch.setattr(fused_conv, "end_dtype", lambda h: dtype)
    h, norm_weight, norm_bias, weight, bias = norm_silu_conv_inputs((1, 8, 3, 16, 16))
    near_constant, cancelling = (norm_weight * 0.1, norm_bias * 0.1 + 2.6), weight - weight.mean(1, True)
    given = [h.bfloat16().double(), *near_constant, cancelling, bias]
    exact = reference(*given)
    inputs = [given[0].bfloat16(), *(t.float() for t in given[1:])]
    found, plain = operation(*inputs), reference(*inputs)
    assert found.dtype == torch.bfloat16
    assert (
        relative_error([found], [exact]) < relative_error([plain], [exact]) / 4
    )  # 8, and the result's rounding


@pytest.fixture(params=["tf32", "ieee"])
def precision(request):
    """What a program has chosen for convolutions of fp32; after "ieee", `allow_tf32` cannot be read."""
    backend = torch.backends.cudnn.conv
    before, backend.fp32_precision = backend.fp32_precision, request.param
    yield request.param
    backend.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_gradients_only_the_result_is_rounded(dtype, precision, monkeypatch):
    backend, conv2d, used = torch.backends.cudnn.conv, F.conv2d, []

    def recorded(*arguments, **options):
        used.append(backend.fp32_precision)
        return conv2d(*arguments, **options)

    h, *parameters = norm_silu_conv_inputs((1, 8, 3, 16, 16))
    h, parameters = h.to(dtype), [t.float() for t in parameters]
    monkeypatch.setattr(F, "conv2d", recorded)
    with torch.no_grad():
        found, exact = operation(h, *parameters), operation(h.float(), *parameters)
    assert torch.equal(found, exact.to(dtype))
    assert used == ["ieee", precision]
    assert backend.fp32_precision == precision


@pytest.mark.parametrize(
    ("dtype", "in_a_step", "without"),
    [
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_dtype_of_the_ends_on_a_card(dtype, in_a_step, without):
    h = torch.zeros(1, dtype=dtype, device="meta")  # counted as on a card
    assert end_dtype(h) == in_a_step
    with torch.no_grad():
        assert end_dtype(h) == without
    emulated = torch.float32 if dtype == torch.bfloat16 else in_a_step
    assert end_dtype(torch.zeros(1, dtype=dtype)) == emulated


def test_saves_only_its_input_and_the_statistics():
    inputs = norm_silu_conv_inputs((2, 8, 12, 16, 16), dtype=torch.float32, device="meta")
    with LiveBytes() as counter:
        out = operation(*inputs)
        assert counter.current == out.nbytes + 2 * (2 * GROUPS) * 4
        assert counter.peak >= out.nbytes + inputs[0].nbytes  # the activation existed in between


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


def test_flops():
    (_, forward), (_, both) = counted(upsample_conv, (2, 8, 16, 16), 12)
    assert both == 3 * forward == 3 * 2 * (2 * 32 * 32) * 8 * 12 * 4  # four taps for each upsampled pixel
    (_, forward), (_, both) = counted(downsample_conv, (2, 8, 16, 16), 12)
    assert both == 3 * forward == 3 * 2 * (2 * 9 * 9) * 8 * 12 * 9  # one row and one column are dropped


def test_downsample_needs_no_padded_copy():
    (mine, _), (mine_both, _) = counted(downsample_conv, (1, 8, 256, 256), 8)
    (plain, _), (plain_both, _) = counted(downsample_conv_reference, (1, 8, 256, 256), 8)
    image = 8 * 256 * 256 * 2
    assert mine < 0.55 * image < 1.2 * image < plain
    assert mine_both < plain_both - 0.5 * image
