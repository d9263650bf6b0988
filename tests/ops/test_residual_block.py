"""The residual block as one operation: exact, with and without a change of width, and lean."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vae.memory.live_bytes import LiveBytes
from vae.ops.library import IMPLEMENTATIONS
from vae.ops.residual_block import residual_block, residual_block_reference

GROUPS, EPS = 4, 1e-6
SHAPES = [(1, 8, 12, 7, 9), (2, 8, 8, 1, 5), (3, 12, 8, 16, 6), (1, 8, 8, 9, 9)]  # (B, C, C', H, W)


def arguments(shape, dtype=torch.float64, weights_dtype=None, channels_last=False, device="cpu"):
    """Seeded x and the block's parameters, all with gradient."""
    batch, width, out, height, side = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, width, height, side), (width,), (width,), (out, width, 3, 3), (out,)]
    sizes += [(out,), (out,), (out, out, 3, 3), (out,)]
    sizes += [(out, width, 1, 1), (out,)] if out != width else []
    found = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    found = [t.to(device, dtype if i == 0 else weights_dtype or dtype) for i, t in enumerate(found)]
    if channels_last:
        found[0] = found[0].contiguous(memory_format=torch.channels_last)
    return [t.requires_grad_() for t in found]


def with_gradients(function, tensors):
    """The function's value and the gradients of a fixed weighting of it."""
    out = function(tensors[0], tensors[1:], GROUPS, EPS)
    weighting = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weighting).sum(), tensors)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_the_reference(shape, channels_last):
    tensors = arguments(shape, channels_last=channels_last)
    found = with_gradients(residual_block, tensors)
    for one, other in zip(found, with_gradients(residual_block_reference, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_over_fp32_weights_is_as_near_to_fp64_as_plain_bf16(shape):
    exact = with_gradients(residual_block_reference, arguments(shape))
    tensors = arguments(shape, torch.bfloat16, torch.float32)
    found = with_gradients(residual_block, tensors)
    plain = with_gradients(residual_block_reference, tensors)
    assert [t.dtype for t in found] == [torch.bfloat16] * 2 + [torch.float32] * (len(tensors) - 1)

    def error(results):
        return sum(
            float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(results, exact, strict=True)
        )

    assert error(found) <= 1.1 * error(plain)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 8, 12, 5, 6), (2, 8, 8, 5, 6)])
def test_is_a_well_behaved_operator(shape):
    x, *parameters = arguments(shape, torch.float32)
    torch.library.opcheck(torch.ops.vae.residual_block.default, (x, parameters, GROUPS, EPS))


def test_keeps_its_input_and_the_statistics_alone():
    tensors = arguments((2, 8, 12, 16, 16), torch.float32, device="meta")
    with LiveBytes() as counter:
        out = residual_block(tensors[0], tensors[1:], GROUPS, EPS)
        assert counter.current == out.nbytes + 4 * (2 * GROUPS) * 4


def test_backward_holds_three_activations_at_most():
    # besides x and the gradient handed in: h1 and two under way; the norms' gradients are written in place
    x, *parameters = arguments((1, 64, 64, 64, 64), torch.float32, device="meta")
    out = residual_block(x, parameters, GROUPS, EPS)
    with LiveBytes() as counter:
        out.backward(torch.empty_like(out))
    weights = sum(p.nbytes for p in parameters)
    assert counter.peak <= 3 * x.nbytes + 2 * weights


def test_arithmetic_is_three_times_the_forward_and_one_convolution():
    x, *parameters = arguments((1, 8, 8, 16, 16), torch.float32, device="meta")
    one = 2 * 16 * 16 * 8 * 8 * 9
    with LiveBytes() as counter:
        residual_block(x, parameters, GROUPS, EPS).sum().backward()
    assert counter.flops == (2 + 1 + 4) * one


@pytest.mark.parametrize("shape", SHAPES)
def test_the_formulas_of_arithmetic_count_the_convolutions_within(shape):
    x, *parameters = arguments(shape, torch.float32, device="meta")
    x, parameters = x.detach(), [p.detach() for p in parameters]
    forward, backward = torch.ops.vae.residual_block.default, torch.ops.vae.residual_block_backward.default
    out, *statistics = forward(x, parameters, GROUPS, EPS)
    for op, given in (
        (forward, (x, parameters, GROUPS, EPS)),
        (backward, (out, x, statistics, parameters, GROUPS)),
    ):
        with LiveBytes() as within:
            IMPLEMENTATIONS[op](*given)
        with FlopCounterMode(display=False) as formula:
            op(*given)
        assert formula.get_total_flops() == within.flops > 0
