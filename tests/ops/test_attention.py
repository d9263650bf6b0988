"""Attention in blocks equals the whole-matrix form, forward and backward, and never holds that matrix."""

import pytest
import torch
import torch.nn.functional as F

from vae.memory.live_bytes import LiveBytes
from vae.ops import attention as module
from vae.ops.attention import attention, attention_reference


def tensors(batch, tokens, channels, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, tokens, channels)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def results(function, inputs):
    out = function(*inputs)
    projection = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad((out * projection.to(out.dtype)).sum(), inputs)]


@pytest.mark.parametrize(("batch", "tokens", "channels"), [(1, 1, 4), (1, 37, 8), (2, 64, 5), (3, 101, 16)])
@pytest.mark.parametrize("block", [1, 64, 1000, 2**24])
def test_blocks_equal_the_whole_matrix_in_fp64(batch, tokens, channels, block, monkeypatch):
    monkeypatch.setattr(module, "SCORE_BLOCK_ELEMENTS", block)
    inputs = tensors(batch, tokens, channels)
    for found, expected in zip(results(attention, inputs), results(attention_reference, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_blocks_cover_every_query_once(monkeypatch):
    monkeypatch.setattr(module, "SCORE_BLOCK_ELEMENTS", 300)
    blocks = module._blocks(101)
    assert len(blocks) > 10
    assert [i for rows in blocks for i in range(101)[rows]] == list(range(101))
    assert all((rows.stop - rows.start) * 101 <= 300 for rows in blocks)


def test_the_reference_is_pytorchs_attention():
    inputs = tensors(2, 33, 8)

    def stock(q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]

    for found, expected in zip(results(attention_reference, inputs), results(stock, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# One rounding of each dtype in scores, weights and output; sums over blocks are in fp32.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)])
def test_lower_precision(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(module, "SCORE_BLOCK_ELEMENTS", 500)
    exact = tensors(2, 97, 16)
    low = [value.detach().to(dtype).requires_grad_() for value in exact]
    found, expected = results(attention, low), results(attention_reference, exact)
    for mine, plain in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - plain).abs().max() < tolerance * plain.abs().max()


def test_large_scores_do_not_overflow():
    q, k, v = (60 * value.detach() for value in tensors(1, 40, 8, torch.float32))
    assert attention(q, k, v).isfinite().all()


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_no_score_matrix_is_ever_alive(tokens):
    channels = 64
    inputs = [torch.empty(1, tokens, channels, device="meta", requires_grad=True) for _ in range(3)]
    with LiveBytes() as counter:
        attention(*inputs).sum().backward()
    matrix = tokens * tokens * 4
    linear = tokens * channels * 4
    # a handful of block-sized temporaries (64 MiB each) and of tensors as large as the inputs
    assert counter.peak < 8 * module.SCORE_BLOCK_ELEMENTS * 4 + 12 * linear
    assert counter.peak < matrix * (0.7 if tokens == 16_384 else 0.05)
