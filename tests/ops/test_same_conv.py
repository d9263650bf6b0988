"""The convolution that keeps the sides: PyTorch's, over fp32 weights of which no cast copy is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from tests.ops.test_resample import results, tensors
from vae.memory.live_bytes import LiveBytes
from vae.ops.fused_conv import same_conv

LAYOUTS = [torch.contiguous_format, torch.channels_last]
SHAPES = [((1, 4, 7, 9), 6, 3), ((2, 3, 1, 5), 4, 3), ((3, 5, 8, 6), 2, 1)]  # (B, C, H, W), C', kernel


def plain(h, weight, bias):
    """The same from PyTorch, weights cast by autograd."""
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=weight.shape[2] // 2)


def arguments(
    shape, out_channels, size, dtype=torch.float64, layout=torch.contiguous_format, weight_layout=None
):
    """h in `dtype`, weight and bias in at least fp32, all with gradient."""
    h, weight, bias = tensors(shape, out_channels, torch.promote_types(dtype, torch.float32), size)
    h = h.detach().to(dtype, memory_format=layout)
    weight = weight.detach().contiguous(memory_format=weight_layout or layout)
    return [t.requires_grad_() for t in (h, weight, bias)]


@pytest.mark.parametrize(("shape", "out_channels", "size"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_pytorchs(shape, out_channels, size, layout):
    inputs = arguments(shape, out_channels, size, layout=layout)
    for found, expected in zip(results(same_conv, inputs), results(plain, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "out_channels", "size"), SHAPES)
def test_bf16_over_fp32_weights(shape, out_channels, size):
    inputs = arguments(shape, out_channels, size, torch.bfloat16)
    found, expected = results(same_conv, inputs), results(plain, inputs)
    assert [t.dtype for t in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keeps_the_rules_of_operators(size, layout):
    inputs = arguments((2, 4, 5, 6), 3, size, torch.float32, layout)
    torch.library.opcheck(torch.ops.vae.same_conv.default, inputs)


def test_keeps_its_input_and_the_weight_alone():
    h, weight, bias = arguments((1, 4, 8, 8), 6, 3, torch.bfloat16)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        same_conv(h, weight, bias)
    assert [t.data_ptr() for t in kept] == [h.data_ptr(), weight.data_ptr()]


@pytest.mark.parametrize(("frozen", "products"), [((), 3), ((0,), 2), ((1, 2), 2), ((1,), 3)])
def test_gradients_that_nobody_wants_are_not_computed(frozen, products):
    inputs = arguments((1, 4, 16, 16), 6, 3)
    wanted = [t for index, t in enumerate(inputs) if index not in frozen]
    for index in frozen:
        inputs[index].requires_grad_(False)
    out = same_conv(*inputs)
    found = torch.autograd.grad(out.sum(), wanted)
    for mine, theirs in zip(found, torch.autograd.grad(plain(*inputs).sum(), wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    on_meta = [t.detach().to("meta").requires_grad_(t.requires_grad) for t in inputs]
    with LiveBytes() as counter:
        same_conv(*on_meta).sum().backward()
    assert counter.flops == products * 2 * 16 * 16 * 4 * 6 * 9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("name", ["same_conv", "upsample_conv", "downsample_conv"])
def test_compiled_code_is_promised_the_layouts_it_gets(name, layout, weight_layout, monkeypatch):
    monkeypatch.setattr("vae.ops.weight_gradient.WHOLE_PLANE_BYTES", 0)
    h, weight, _ = arguments((2, 4, 6, 8), 6, 3, torch.bfloat16, layout, weight_layout)
    out = getattr(torch.ops.vae, name)(h, weight, weight.new_zeros(6)).detach()
    backward = getattr(torch.ops.vae, f"{name}_backward")
    more = (True, True) if name == "same_conv" else ()
    real = backward(out, h.detach(), weight.detach(), *more)
    promised = backward(out.to("meta"), h.detach().to("meta"), weight.detach().to("meta"), *more)
    assert [t.stride() for t in real] == [t.stride() for t in promised]
    assert [t.dtype for t in real] == [t.dtype for t in promised]
