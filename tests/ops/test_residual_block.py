"""The residual block as one operation: exact, with and without a change of width, and using little memory."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.operations import (
    EPS,
    GROUPS,
    LAYOUTS,
    RESIDUAL_BLOCK_SHAPES,
    relative_error,
    residual_block_inputs,
    with_gradients,
)
from vae.memory.live_bytes import LiveBytes
from vae.ops.library import IMPLEMENTATIONS
from vae.ops.residual_block import residual_block, residual_block_reference


def operation(x, *parameters):
    return residual_block(x, parameters, GROUPS, EPS)


def reference(x, *parameters):
    return residual_block_reference(x, parameters, GROUPS, EPS)


def on_meta(shape):
    return residual_block_inputs(shape, dtype=torch.float32, device="meta")


@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_reference(shape, layout):
    inputs = residual_block_inputs(shape, layout=layout)
    for result, expected in zip(
        with_gradients(operation, inputs), with_gradients(reference, inputs), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES)
def test_bf16_with_fp32_weights_is_as_close_to_fp64_as_plain_bf16(shape):
    exact = with_gradients(reference, residual_block_inputs(shape))
    inputs = residual_block_inputs(shape, dtype=torch.bfloat16, weights_dtype=torch.float32)
    results = with_gradients(operation, inputs)
    plain = with_gradients(reference, inputs)
    assert [t.dtype for t in results] == [torch.bfloat16] * 2 + [torch.float32] * (len(inputs) - 1)
    assert relative_error(results, exact) <= 1.1 * relative_error(plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 8, 12, 5, 6), (2, 8, 8, 5, 6)])
def test_passes_opcheck(shape):
    x, *parameters = residual_block_inputs(shape, dtype=torch.float32)
    torch.library.opcheck(torch.ops.vae.residual_block.default, (x, parameters, GROUPS, EPS))


def test_saves_only_its_input_and_the_statistics():
    inputs = on_meta((2, 8, 12, 16, 16))
    with LiveBytes() as counter:
        out = operation(*inputs)
        assert counter.current == out.nbytes + 4 * (2 * GROUPS) * 4


def test_backward_allocates_at_most_three_activations():
    # in addition to x and grad_out: the inner activation and two gradients; norm gradients are in place
    x, *parameters = on_meta((1, 64, 64, 64, 64))
    out = residual_block(x, parameters, GROUPS, EPS)
    with LiveBytes() as counter:
        out.backward(torch.empty_like(out))
    weights = sum(p.nbytes for p in parameters)
    assert counter.peak <= 3 * x.nbytes + 2 * weights


def test_flops_are_three_times_the_forward_and_one_convolution():
    one = 2 * 16 * 16 * 8 * 8 * 9
    with LiveBytes() as counter:
        operation(*on_meta((1, 8, 8, 16, 16))).sum().backward()
    assert counter.flops == (2 + 1 + 4) * one


@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES)
def test_flop_formulas_count_the_convolutions_within(shape):
    x, *parameters = (t.detach() for t in on_meta(shape))
    forward, backward = torch.ops.vae.residual_block.default, torch.ops.vae.residual_block_backward.default
    out, *statistics = forward(x, parameters, GROUPS, EPS)
    for op, arguments in (
        (forward, (x, parameters, GROUPS, EPS)),
        (backward, (out, x, statistics, parameters, GROUPS)),
    ):
        with LiveBytes() as within:
            IMPLEMENTATIONS[op](*arguments)
        with FlopCounterMode(display=False) as formula:
            op(*arguments)
        assert formula.get_total_flops() == within.flops > 0
