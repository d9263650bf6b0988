"""The residual block as one operation: exact at each recompute level, and using little memory."""

import pytest
import torch

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
from vae.ops.residual_block import residual_block, residual_block_reference

LEVELS = ["none", "activations", "block"]


def operation(recompute):
    return lambda x, *parameters: residual_block(x, parameters, GROUPS, EPS, recompute)


def reference(x, *parameters):
    return residual_block_reference(x, parameters, GROUPS, EPS)


def on_meta(shape):
    return residual_block_inputs(shape, dtype=torch.float32, device="meta")


@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_equals_the_reference(shape, layout, level):
    inputs = residual_block_inputs(shape, layout=layout)
    for result, expected in zip(
        with_gradients(operation(level), inputs), with_gradients(reference, inputs), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES)
def test_bf16_with_fp32_weights_is_as_close_to_fp64_as_plain_bf16(shape):
    exact = with_gradients(reference, residual_block_inputs(shape))
    inputs = residual_block_inputs(shape, dtype=torch.bfloat16, weights_dtype=torch.float32)
    results = with_gradients(operation("block"), inputs)
    plain = with_gradients(reference, inputs)
    assert [t.dtype for t in results] == [torch.bfloat16] * 2 + [torch.float32] * (len(inputs) - 1)
    assert relative_error(results, exact) <= 1.1 * relative_error(plain, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_levels_have_the_same_gradients_in_bf16(layout):
    inputs = residual_block_inputs((2, 8, 12, 9, 6), dtype=torch.bfloat16, weights_dtype=torch.float32)
    inputs[0] = inputs[0].detach().contiguous(memory_format=layout).requires_grad_()
    first, *others = (with_gradients(operation(level), inputs) for level in LEVELS)
    for results in others:
        assert all(map(torch.equal, results, first))


@pytest.mark.parametrize("shape", RESIDUAL_BLOCK_SHAPES[:2])
def test_parameters_of_equal_gradients_share_no_memory(shape):
    _, *grads = with_gradients(operation("block"), residual_block_inputs(shape))
    assert len({grad.data_ptr() for grad in grads}) == len(grads)  # they are clipped in place


@pytest.mark.parametrize(("level", "tensors"), [("block", 0), ("activations", 1), ("none", 3)])
def test_saves_what_the_level_says(level, tensors):
    inputs = on_meta((2, 8, 8, 16, 16))
    with LiveBytes() as counter:
        out = operation(level)(*inputs)
        assert counter.current == out.nbytes + 4 * (2 * GROUPS) * 4 + tensors * inputs[0].nbytes


def test_backward_allocates_at_most_three_activations():
    # in addition to x and grad_out: the inner activation and two gradients; norm gradients are in place
    x, *parameters = on_meta((1, 64, 64, 64, 64))
    out = residual_block(x, parameters, GROUPS, EPS)
    with LiveBytes() as counter:
        out.backward(torch.empty_like(out))
    weights = sum(p.nbytes for p in parameters)
    assert counter.peak <= 3 * x.nbytes + 2 * weights


@pytest.mark.parametrize(("level", "recomputed"), [("block", 1), ("activations", 0), ("none", 0)])
def test_flops_are_three_times_the_forward_and_what_is_recomputed(level, recomputed):
    one = 2 * 16 * 16 * 8 * 8 * 9
    with LiveBytes() as counter:
        operation(level)(*on_meta((1, 8, 8, 16, 16))).sum().backward()
    assert counter.flops == (2 + recomputed + 4) * one


def test_without_gradients_nothing_is_stored():
    inputs = on_meta((2, 8, 8, 16, 16))
    with torch.no_grad(), LiveBytes() as counter:
        operation("none")(*inputs)
    # the inner h, its activation and the output
    assert counter.peak <= 3 * inputs[0].nbytes + sum(t.nbytes for t in inputs[1:])
