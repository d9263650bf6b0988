"""What the Triton kernels must fulfil, on a GPU or in Triton's interpreter on the CPU.

`TRITON_INTERPRET=1 python -m tests.harness.kernel_checks` runs all of them in the interpreter. They need a
process of their own because Triton reads that variable when it is imported.
"""

import itertools
import sys

import torch

from vae.ops import attention as attention_module
from vae.ops import attention_triton, gpu_blocks, norm_triton
from vae.ops import norm as norm_module
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference
from vae.ops.norm import group_norm_reference, group_norm_silu
from vae.ops.residual_block import residual_block, residual_block_reference

EPS = 1e-6
# Largest difference over largest value. fp32 statistics and arithmetic: some units of 2^-24. bf16 and fp16:
# one rounding of each result (of each weight and score too in attention); the interpreter truncates to bf16,
# twice as coarse as a GPU's rounding.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

# (B, C, H, W), groups, programs of a reduction: widths that fill no tile, one image and three, several tiles
# in one program with a rest
NORM_CASES = [
    ((1, 4, 1, 3), 2, 1024),
    ((2, 12, 5, 3), 3, 1024),
    ((1, 24, 33, 35), 1, 2),
    ((1, 8, 70, 71), 4, 3),
    ((3, 200, 3, 5), 25, 1024),
    ((1, 384, 2, 3), 32, 1024),
    ((1, 768, 3, 3), 32, 1024),
]
# (B, N, C), queries and keys of a block
ATTENTION_CASES = [
    ((1, 2, 4), (16, 24)),
    ((2, 37, 8), (16, 24)),
    ((3, 50, 40), (64, 16)),
    ((1, 65, 3), (32, 100)),
]


def compare(found, expected, dtype: torch.dtype, what: str) -> None:
    """Raise AssertionError where a tensor is further from its fp64 reference than TOLERANCE[dtype]."""
    for name, mine, exact in zip(("out", "grad 1", "grad 2", "grad 3"), found, expected, strict=True):
        error = ((mine.double() - exact).abs().max() / exact.abs().max()).item()
        assert error < TOLERANCE[dtype], f"{what}: {name} is {error:.1e} away"  # NaN too


def check_norm(device: str, shape, groups: int, programs: int, dtype, layout, silu: bool) -> None:
    """Statistics, forward and backward of one case against the reference in fp64."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(s, generator=generator) for s in (shape, shape, shape[1], shape[1])]
    h, grad = (t.to(device, dtype).contiguous(memory_format=layout) for t in (draw[0] * 2 + 3, draw[1]))
    weight, bias = (t.to(device) for t in draw[2:])
    exact = [t.detach().double().requires_grad_() for t in (h, weight, bias)]
    expected = group_norm_reference(*exact, groups, EPS, silu)
    expected = [expected.detach(), *torch.autograd.grad(expected, exact, grad.double())]
    gpu_blocks.REDUCTION_PROGRAMS, before = programs, gpu_blocks.REDUCTION_PROGRAMS
    try:
        mean, rstd = norm_triton.statistics(h, groups, EPS)
        out = norm_triton.forward(h, mean, rstd, weight, bias, silu)
        found = [out, *norm_triton.backward(grad, h, mean, rstd, weight, bias, silu)]
        again = norm_triton.backward(grad, h, mean, rstd, weight, bias, silu, in_place=True)[0]
        assert again is grad
        assert torch.equal(again, found[1])
    finally:
        gpu_blocks.REDUCTION_PROGRAMS = before
    assert found[0].stride() == found[1].stride() == h.stride()
    assert [t.dtype for t in (*found, mean, rstd)] == [dtype] * 2 + [torch.float32] * 4
    compare(found, expected, dtype, f"norm {shape} {groups} {dtype} {layout} silu={silu}")


def check_statistics_of_a_large_mean(device: str) -> None:
    """Variance 1 around 4096: E[x^2] - E[x]^2 would have no correct digit left in fp32."""
    h = 4096 + torch.randn(2, 6, 9, 70, generator=torch.Generator().manual_seed(0))
    exact = h.double().view(2, 3, -1)
    for layout in (torch.contiguous_format, torch.channels_last):
        mean, rstd = norm_triton.statistics(h.to(device).contiguous(memory_format=layout), 3, EPS)
        torch.testing.assert_close(mean.double().cpu(), exact.mean(-1), rtol=1e-6, atol=0)
        deviation = exact.std(-1, correction=0)
        torch.testing.assert_close(rstd.double().cpu(), 1 / deviation, rtol=1e-4, atol=0)


def check_attention(device: str, shape, block, dtype) -> None:
    """Forward and backward of one case against the reference in fp64; the products are PyTorch's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = attention_module.attention_reference(*exact)
    expected = [expected.detach(), *torch.autograd.grad(expected, exact, grad.double())]
    names = ("CPU_BLOCK", "GPU_BLOCK", "_steps")
    before = [getattr(attention_module, name) for name in names]
    try:
        attention_module.CPU_BLOCK = attention_module.GPU_BLOCK = block
        attention_module._steps = lambda _: attention_triton
        out, log_sums = attention_module._attention(q, k, v)
        found = [out, *attention_module._attention_backward(grad, q, k, v, out, log_sums)]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(attention_module, name, value)
    compare(found, expected, dtype, f"attention {shape} {block} {dtype}")


def check_operations(device: str, layout) -> None:
    """The registered operations, forward and backward, with the kernels in them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 8, 5, 6), (8,), (8,), (16, 8, 3, 3), (16,), (16,), (16,), (16, 16, 3, 3), (16,)]
    shapes += [(16, 8, 1, 1), (16,)]
    x, *parameters = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    x = x.contiguous(memory_format=layout)
    tokens = [x.flatten(2).mT.contiguous() * factor for factor in (1.0, -0.5, 2.0)]
    pairs = {
        "group_norm_silu": (
            lambda h, weight, bias: group_norm_silu(h, weight, bias, 4, EPS),
            lambda h, weight, bias: group_norm_reference(h, weight, bias, 4, EPS, True),
            [x, *parameters[:2]],
        ),
        "norm_silu_conv": (
            lambda *tensors: norm_silu_conv(*tensors, 4, EPS),
            lambda *tensors: norm_silu_conv_reference(*tensors, 4, EPS),
            [x, *parameters[:4]],
        ),
        "residual_block": (
            lambda h, *rest: residual_block(h, rest, 4, EPS),
            lambda h, *rest: residual_block_reference(h, rest, 4, EPS),
            [x, *parameters],
        ),
        "attention": (attention_module.attention, attention_module.attention_reference, tokens),
    }
    before = norm_module._kernels, attention_module._steps
    norm_module._kernels, attention_module._steps = lambda _: norm_triton, lambda _: attention_triton
    try:
        for name, (operation, reference, tensors) in pairs.items():
            mine = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
            exact = [t.detach().double().requires_grad_() for t in tensors]
            out, expected = operation(*mine), reference(*exact)
            found = torch.autograd.grad(out.sin().sum(), mine)
            wanted = torch.autograd.grad(expected.sin().sum(), exact)
            for index, (one, other) in enumerate(zip((out, *found), (expected, *wanted), strict=True)):
                error = ((one.double() - other).abs().max() / other.abs().max()).item()
                # cuDNN's convolutions may take TF32, 2^-11 a factor, on a GPU
                assert error < (2e-5 if device == "cpu" else 5e-3), (
                    f"{name} {layout}: {index} is {error:.1e} away"
                )
    finally:
        norm_module._kernels, attention_module._steps = before


def norm_grid(thorough: bool):
    """Arguments of check_norm after the device; the short grid is for the interpreter, which is slow."""
    layouts = (torch.contiguous_format, torch.channels_last)
    for case, dtype, layout, silu in itertools.product(NORM_CASES, TOLERANCE, layouts, (False, True)):
        few = case[0][1] < 200 or layout == torch.channels_last
        if thorough or (silu and few and (dtype == torch.float32 or case is NORM_CASES[1])):
            yield *case, dtype, layout, silu


def attention_grid():
    """Arguments of check_attention after the device."""
    for case, dtype in itertools.product(ATTENTION_CASES, TOLERANCE):
        yield *case, dtype


def check_all(device: str, thorough: bool) -> int:
    """Run every check, and return how many there were."""
    norms, attentions = list(norm_grid(thorough)), list(attention_grid())
    for case in norms:
        check_norm(device, *case)
    for case in attentions:
        check_attention(device, *case)
    check_statistics_of_a_large_mean(device)
    for layout in (torch.contiguous_format, torch.channels_last):
        check_operations(device, layout)
    return len(norms) + len(attentions) + 1


if __name__ == "__main__":
    print(check_all("cpu", thorough="--thorough" in sys.argv))
