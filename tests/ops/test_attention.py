"""Attention in blocks equals the whole-matrix form, forward and backward, without allocating that matrix."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.operations import with_gradients
from vae.memory.live_bytes import LiveBytes
from vae.ops import attention as module
from vae.ops.attention import attention, attention_blocks, attention_reference


def tensors(batch, tokens, channels, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, tokens, channels)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


SHAPES = [(1, 1, 4), (1, 37, 8), (2, 64, 5), (3, 101, 16)]  # images, tokens, channels


def use_queries(monkeypatch, queries):
    """Blocks of so many queries, and of as many images as they suffice for."""
    monkeypatch.setattr(module, "CPU_SCORES", 0)
    monkeypatch.setattr(module, "CPU_QUERIES", queries)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queries", [1, 5, 4096])
def test_blocks_equal_whole_matrix_in_fp64(queries, shape, monkeypatch):
    use_queries(monkeypatch, queries)
    inputs = tensors(*shape)
    for found, expected in zip(
        with_gradients(attention, inputs), with_gradients(attention_reference, inputs), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_batched_images_do_not_mix(at_once, monkeypatch):
    use_queries(monkeypatch, 37 * at_once + 5)
    assert attention_blocks(3, 37, 8, "cpu") == (at_once, 37)
    together = with_gradients(attention, tensors(3, 37, 8))
    for image in range(3):
        alone = [value.detach()[image : image + 1].requires_grad_() for value in tensors(3, 37, 8)]
        torch.testing.assert_close(attention(*alone), together[0][image : image + 1], rtol=1e-12, atol=1e-13)


def test_strided_and_expanded_inputs():
    q, k, v = tensors(2, 21, 6)
    odd = [t.detach().mT.contiguous().mT.requires_grad_() for t in (q, k)]
    odd.append(v.detach()[:1, :1].clone().requires_grad_())
    plain = attention_reference(*odd[:2], odd[2].expand(2, 21, 6))
    found = attention(*odd[:2], odd[2].expand(2, 21, 6))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), odd), torch.autograd.grad(plain.sum(), odd), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_reference_is_pytorch_attention():
    inputs = tensors(2, 33, 8)

    def stock(q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]

    for found, expected in zip(
        with_gradients(attention_reference, inputs), with_gradients(stock, inputs), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Scores, weights and output are rounded once to each dtype; sums over blocks are in fp32.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)]
)
def test_lower_precision(dtype, tolerance, monkeypatch):
    use_queries(monkeypatch, 20)
    exact = tensors(2, 97, 16)
    low = [value.detach().to(dtype).requires_grad_() for value in exact]
    found, expected = with_gradients(attention, low), with_gradients(attention_reference, exact)
    for mine, plain in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - plain).abs().max() < tolerance * plain.abs().max()


def error(found, exact):
    return (found.double() - exact).norm() / exact.norm()


def test_bf16_is_as_exact_as_plain_bf16(monkeypatch):
    use_queries(monkeypatch, 32)
    low = [value.detach().bfloat16().requires_grad_() for value in tensors(2, 200, 32)]
    exact = with_gradients(attention_reference, [value.detach().double().requires_grad_() for value in low])
    plain, found = with_gradients(attention_reference, low), with_gradients(attention, low)
    for mine, theirs, reference in zip(found, plain, exact, strict=True):
        assert error(mine, reference) < 1.1 * error(theirs, reference)


@pytest.mark.parametrize(
    ("tokens", "channels", "queries"),
    [(16_384, 64, 512), (65_536, 512, 4096), pytest.param(2**20, 512, 512, marks=pytest.mark.slow)],
)
def test_scratch_is_bounded_by_the_size_of_the_inputs_and_by_2_to_the_29_scores(tokens, channels, queries):
    assert attention_blocks(3, tokens, channels, "cuda") == (1, queries)
    assert attention_blocks(3, tokens, channels, "cuda", has_gradient=False) == (
        1,
        min(2 * channels, queries),
    )
    shape = (1, tokens, channels)
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with LiveBytes() as counter:
        attention(*inputs).sum().backward()
    # output and q's gradient, those of k and v in fp32; per query: log-sum, delta
    linear = tokens * (channels * (2 + 2 + 2 * 4) + 2 * 4)
    scratch = 2 * queries * tokens * (4 + 2)  # the scores and their gradients, in fp32 and in bf16
    assert linear + scratch <= counter.peak < linear + scratch + 2**10


@pytest.mark.parametrize("tokens", [100, 5000])
def test_flops_are_two_products_forward_and_five_backward(tokens):
    inputs = [torch.empty(2, tokens, 24, device="meta", requires_grad=True) for _ in range(3)]
    with FlopCounterMode(display=False) as forward:
        out = attention(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    product = 2 * 2 * tokens**2 * 24
    assert (forward.get_total_flops(), backward.get_total_flops()) == (2 * product, 5 * product)


def test_large_scores_do_not_overflow():
    q, k, v = (60 * value.detach() for value in tensors(1, 40, 8, torch.float32))
    assert attention(q, k, v).isfinite().all()
