"""norm+SiLU+conv as one operation: exact, in the input's dtype, and saving little for backward."""

import pytest
import torch
import torch.nn.functional as F

from tests.harness.operations import (
    EPS,
    GROUPS,
    LAYOUTS,
    NORM_SILU_CONV_SHAPES,
    norm_silu_conv_inputs,
    relative_error,
    with_gradients,
)
from vae.memory.live_bytes import LiveBytes
from vae.ops import fused_conv
from vae.ops.fused_conv import end_dtype, norm_silu_conv, norm_silu_conv_reference


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
