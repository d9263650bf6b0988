"""norm+SiLU+conv as one operation: exact, in the input's dtype, and lean in what it keeps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vae.memory.live_bytes import LiveBytes
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference
from vae.ops.library import IMPLEMENTATIONS

GROUPS, EPS = 4, 1e-6
SHAPES = [(1, 8, 12, 7, 9), (2, 12, 8, 1, 5), (3, 8, 8, 16, 6)]  # (B, C, C', H, W)


def arguments(shape, dtype=torch.float64, weights_dtype=None, channels_last=False):
    """Seeded h, norm weight and bias, convolution weight and bias, all with gradient."""
    batch, width, out, height, side = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, width, height, side), (width,), (width,), (out, width, 3, 3), (out,)]
    found = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    found = [t.to(dtype if i == 0 else weights_dtype or dtype) for i, t in enumerate(found)]
    if channels_last:
        found[0] = found[0].contiguous(memory_format=torch.channels_last)
    return [t.requires_grad_() for t in found]


def with_gradients(function, tensors):
    """The function's value and the gradients of a fixed weighting of it."""
    out = function(*tensors, GROUPS, EPS)
    weighting = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weighting).sum(), tensors)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_the_reference(shape, channels_last):
    tensors = arguments(shape, channels_last=channels_last)
    found = with_gradients(norm_silu_conv, tensors)
    for one, other in zip(found, with_gradients(norm_silu_conv_reference, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_over_fp32_weights_is_as_near_to_fp64_as_plain_bf16(shape):
    exact = with_gradients(norm_silu_conv_reference, arguments(shape))
    tensors = arguments(shape, torch.bfloat16, torch.float32)
    found = with_gradients(norm_silu_conv, tensors)
    plain = with_gradients(norm_silu_conv_reference, tensors)
    assert [t.dtype for t in found] == [torch.bfloat16] * 2 + [torch.float32] * 4

    def error(results):
        return sum(
            float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(results, exact, strict=True)
        )

    assert error(found) <= 1.1 * error(plain)


def test_is_a_well_behaved_operator():
    tensors = arguments((2, 8, 12, 5, 6), torch.float32)
    torch.library.opcheck(torch.ops.vae.norm_silu_conv.default, (*tensors, GROUPS, EPS))


def test_the_formulas_of_arithmetic_count_the_convolutions_within():
    h, *weights = [t.detach().to("meta") for t in arguments(SHAPES[0])]
    forward, backward = torch.ops.vae.norm_silu_conv.default, torch.ops.vae.norm_silu_conv_backward.default
    out, mean, rstd = forward(h, *weights, GROUPS, EPS)
    for op, given in (
        (forward, (h, *weights, GROUPS, EPS)),
        (backward, (out, h, mean, rstd, *weights[:3], GROUPS)),
    ):
        with LiveBytes() as within:
            IMPLEMENTATIONS[op](*given)
        with FlopCounterMode(display=False) as formula:
            op(*given)
        assert formula.get_total_flops() == within.flops > 0


def test_keeps_its_input_and_the_statistics_alone():
    tensors = [t.detach().to("meta").requires_grad_() for t in arguments((2, 8, 12, 16, 16), torch.float32)]
    with LiveBytes() as counter:
        out = norm_silu_conv(*tensors, GROUPS, EPS)
        assert counter.current == out.nbytes + 2 * (2 * GROUPS) * 4
        assert counter.peak >= out.nbytes + tensors[0].nbytes  # and the activation was there in between
