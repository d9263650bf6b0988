"""The convolution with "same" padding equals PyTorch's and stores no cast copy of its fp32 weights."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from tests.harness.operations import LAYOUTS, conv_inputs, with_gradients
from vae.memory.live_bytes import LiveBytes
from vae.ops.fused_conv import same_conv

SHAPES = [((1, 4, 7, 9), 6, 3), ((2, 3, 1, 5), 4, 3), ((3, 5, 8, 6), 2, 1)]  # (B, C, H, W), C', kernel


def plain(h, weight, bias):
    """The same convolution in PyTorch; autograd casts the weights."""
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=weight.shape[2] // 2)


def mixed_inputs(
    shape, out_channels, size, dtype=torch.float64, layout=torch.contiguous_format, weight_layout=None
):
    """h in `dtype`, weight and bias in at least fp32, with gradient."""
    h, weight, bias = conv_inputs(shape, out_channels, torch.promote_types(dtype, torch.float32), size)
    h = h.detach().to(dtype, memory_format=layout)
    weight = weight.detach().contiguous(memory_format=weight_layout or layout)
    return [t.requires_grad_() for t in (h, weight, bias)]


@pytest.mark.parametrize(("shape", "out_channels", "size"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_pytorch(shape, out_channels, size, layout):
    inputs = mixed_inputs(shape, out_channels, size, layout=layout)
    for result, expected in zip(
        with_gradients(same_conv, inputs), with_gradients(plain, inputs), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "out_channels", "size"), SHAPES)
def test_bf16_with_fp32_weights(shape, out_channels, size):
    inputs = mixed_inputs(shape, out_channels, size, torch.bfloat16)
    results, expected = with_gradients(same_conv, inputs), with_gradients(plain, inputs)
    assert [t.dtype for t in results] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=2e-2, atol=2e-2)


def test_saves_only_its_input_and_the_weight():
    h, weight, bias = mixed_inputs((1, 4, 8, 8), 6, 3, torch.bfloat16)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        same_conv(h, weight, bias)
    assert [t.data_ptr() for t in saved if t.numel()] == [h.data_ptr(), weight.data_ptr()]


@pytest.mark.parametrize(("frozen", "products"), [((), 3), ((0,), 2), ((1, 2), 2), ((1,), 3)])
def test_unwanted_gradients_are_not_computed(frozen, products):
    inputs = mixed_inputs((1, 4, 16, 16), 6, 3)
    wanted = [t for index, t in enumerate(inputs) if index not in frozen]
    for index in frozen:
        inputs[index].requires_grad_(False)
    out = same_conv(*inputs)
    grads = torch.autograd.grad(out.sum(), wanted)
    for grad, expected in zip(grads, torch.autograd.grad(plain(*inputs).sum(), wanted), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)

    on_meta = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in inputs]
    with LiveBytes() as counter:
        same_conv(*on_meta).sum().backward()
    assert counter.flops == products * 2 * 16 * 16 * 4 * 6 * 9
