"""norm+SiLU+conv as one operation: exact, in the input's dtype, and saving little for backward."""

import pytest
import torch

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
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference


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


def test_saves_only_its_input_and_the_statistics():
    inputs = norm_silu_conv_inputs((2, 8, 12, 16, 16), dtype=torch.float32, device="meta")
    with LiveBytes() as counter:
        out = operation(*inputs)
        assert counter.current == out.nbytes + 2 * (2 * GROUPS) * 4
        assert counter.peak >= out.nbytes + inputs[0].nbytes  # the activation existed in between
