"""Checks of the Triton kernels against their references, on a GPU or in Triton's interpreter on the CPU.

`TRITON_INTERPRET=1 python -m tests.harness.kernel_checks` runs all checks in the interpreter. They need a
separate process because Triton reads that variable when it is imported.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from vae.losses import feature_distance, feature_distance_triton
from vae.ops import attention as attention_module
from vae.ops import attention_triton, library, norm_triton, rms_norm_triton
from vae.ops import norm as norm_module
from vae.ops.fused_conv import norm_silu_conv, norm_silu_conv_reference
from vae.ops.norm import Norm, group_norm_reference, group_norm_silu, rms_norm_reference
from vae.ops.residual_block import residual_block, residual_block_reference

EPS = 1e-6
LAYOUT = torch.channels_last  # of all kernels
# Largest difference over largest value. fp32 statistics and arithmetic: some units of 2^-24. bf16 and fp16:
# one rounding of each result (in attention also of each weight and score). The interpreter truncates to bf16,
# which is twice as coarse as a GPU's rounding.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

# (B, C, H, W), groups, programs of a reduction: widths that do not fill a tile, one image and three images,
# several tiles in one program with a remainder
NORM_CASES = [
    ((1, 4, 1, 3), 2, 1024),
    ((2, 12, 5, 3), 3, 1024),
    ((1, 24, 33, 35), 1, 2),
    ((1, 8, 70, 71), 4, 3),
    ((3, 200, 3, 5), 25, 1024),
    ((1, 384, 2, 3), 32, 1024),
    ((1, 768, 3, 3), 32, 1024),
]
# the same without groups: channels that do not fill a tile, several tiles in one program
RMS_CASES = [
    ((1, 3, 1, 2), 0, 512),
    ((2, 96, 9, 11), 0, 512),
    ((3, 200, 13, 5), 0, 2),
    ((1, 384, 7, 3), 0, 1),
]
# (B, N, C), images and queries of a block, scores of a tile
ATTENTION_CASES = [
    ((1, 2, 4), (1, 2), 2048),
    ((2, 37, 8), (1, 16), 16),
    ((3, 50, 40), (2, 50), 2048),
    ((1, 65, 3), (1, 32), 64),
]
# (B, C, h, w) of feature maps: short and long rows of channels, several programs with a remainder
FEATURE_CASES = [(1, 3, 1, 2), (2, 64, 9, 11), (3, 200, 3, 5), (1, 512, 7, 3)]


def largest_error(result: Tensor, exact: Tensor) -> float:
    """Largest difference over largest value."""
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


def compare(results: list[Tensor], expected: list[Tensor], dtype: torch.dtype, case: str) -> None:
    """Raise AssertionError if the error of a tensor exceeds TOLERANCE[dtype]."""
    names = ("out", "grad 1", "grad 2", "grad 3", "grad 4")[: len(results)]
    for name, result, exact in zip(names, results, expected, strict=True):
        error = largest_error(result, exact)
        assert error < TOLERANCE[dtype], f"{case}: error of {name} is {error:.1e}"  # fails for NaN too


def check_norm(
    device: str, shape: tuple[int, int, int, int], groups: int, programs: int, dtype: torch.dtype, silu: bool
) -> None:
    """Compare statistics, forward and backward of one case with the reference in fp64; 0 groups: RMS norm."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(s, generator=generator) for s in (shape, shape, shape, *[shape[1]] * 3)]
    maps = (draw[0] * 2 + 3, *draw[1:3])
    h, grad, skip = (t.to(device, dtype, memory_format=LAYOUT) for t in maps)
    weight, bias, h_bias = (t.to(device) for t in draw[3:])
    given = {"weight": weight} | ({"bias": bias} if groups else {})
    given |= {"h_bias": h_bias} if silu else {}  # both variants, each with one of two activations
    exact = {name: t.detach().double().requires_grad_() for name, t in ({"h": h} | given).items()}
    shifted = exact["h"] + exact["h_bias"][:, None, None] if silu else exact["h"]
    if groups:
        reference = group_norm_reference(shifted, exact["weight"], exact["bias"], groups, EPS, silu)
    else:
        reference = rms_norm_reference(shifted, exact["weight"], silu)
    expected = [reference.detach(), *torch.autograd.grad(reference, [*exact.values()], grad.double())]
    library.REDUCTION_PROGRAMS, before = programs, library.REDUCTION_PROGRAMS
    try:
        norm = Norm(**({"bias": None} | given), groups=groups, eps=EPS, silu=silu)
        kernels = norm_kernels(h, norm)
        fused, statistics = kernels.normalize_with_statistics(h, norm)
        arguments = (h, statistics, norm)
        out, gradients = kernels.normalize(*arguments), kernels.normalize_backward(grad, *arguments)
        results = [out, *(t for t in gradients if t is not None)][: 2 + len(given)]
        assert torch.equal(fused, out)
        with_skip, *_, skip_sums = kernels.normalize_backward(grad, *arguments, skip=skip)
        in_place, *_ = kernels.normalize_backward(grad, *arguments, in_place=True)
        assert in_place is grad
        assert torch.equal(in_place, results[1])
        ends = {}  # of the network, after half precision
        for end_dtype in (torch.float16, torch.float32):
            end = norm._replace(out_dtype=end_dtype)
            ends[end_dtype], _ = kernels.normalize_with_statistics(h, end)
            assert torch.equal(ends[end_dtype], kernels.normalize(h, statistics, end))
        added = norm_triton.add_with_bias(h.clone(memory_format=torch.preserve_format), out, h_bias)
    finally:
        library.REDUCTION_PROGRAMS = before
    case = f"norm {shape} {groups} {dtype} silu={silu}"
    assert results[0].stride() == results[1].stride() == h.stride()
    assert {t.dtype for t in (*results[2:], *statistics)} == {torch.float32}
    for end_dtype, end in ends.items():
        assert end.dtype == end_dtype
        assert end.stride() == h.stride()
        compare([end], expected[:1], end_dtype, f"{case} to {end_dtype}")
    assert added.dtype == results[0].dtype == results[1].dtype == dtype
    total = h.double() + out.double() + h_bias.double()[:, None, None]
    assert largest_error(added, total) < TOLERANCE[dtype]
    compare(results, expected, dtype, case)
    of_skip = [expected[1] + skip.double(), skip.double().sum((0, 2, 3))]
    compare([with_skip, skip_sums], of_skip, dtype, f"{case} with skip")


def check_statistics_with_a_large_mean(device: str) -> None:
    """Variance 1 around 4096: E[x^2] - E[x]^2 would have no correct digit left in fp32."""
    h = 4096 + torch.randn(2, 6, 9, 70, generator=torch.Generator().manual_seed(0))
    exact = h.double().view(2, 3, -1)
    norm = Norm(*torch.ones(2, 6, device=device), 3, EPS)
    _, (mean, rstd) = norm_triton.normalize_with_statistics(h.to(device, memory_format=LAYOUT), norm)
    torch.testing.assert_close(mean.double().cpu(), exact.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double().cpu(), 1 / exact.std(-1, correction=0), rtol=1e-4, atol=0)


def norm_kernels(_h: Tensor, norm: Norm | None = None) -> ModuleType:
    """The module with the kernels of a norm."""
    return norm_triton if norm is None or norm.groups else rms_norm_triton


@contextmanager
def triton_backends() -> Iterator[None]:
    """Every operation uses the Triton kernels, on CPU tensors too."""
    with (
        patch.object(norm_module, "backend", norm_kernels),
        patch.object(attention_module, "backend", lambda _: attention_triton),
    ):
        yield


def check_attention(
    device: str, shape: tuple[int, int, int], block: tuple[int, int], tile: int, dtype: torch.dtype
) -> None:
    """Compare forward and backward of one case with the reference in fp64; matrix products are PyTorch's."""
    generator = torch.Generator().manual_seed(0)
    *inputs, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    reference = attention_module.attention_reference(*exact)
    expected = [reference.detach(), *torch.autograd.grad(reference, exact, grad.double())]
    before = attention_module.attention_blocks, library.ROW_TILE_ELEMENTS
    attention_module.attention_blocks, library.ROW_TILE_ELEMENTS = lambda *_: block, tile
    try:
        with triton_backends():
            inputs = [t.requires_grad_() for t in inputs]
            out = attention_module.attention(*inputs)
            results = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    finally:
        attention_module.attention_blocks, library.ROW_TILE_ELEMENTS = before
    compare(results, expected, dtype, f"attention {shape} {block} {dtype}")


def check_row_products_of_one_token(device: str) -> None:
    """The stride along one token says nothing about where the next image begins."""
    a, b = (torch.arange(24.0, device=device).add(n).as_strided((3, 1, 8), (8, 1, 1)) for n in (0, 1))
    out = torch.empty(3, 1, device=device)
    attention_triton.row_products(a, b, out)
    assert torch.equal(out, (a * b).sum(-1))


def check_feature_distance(device: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Compare an LPIPS distance and its gradient with the PyTorch operations in fp64; one position is 0."""
    generator = torch.Generator().manual_seed(0)
    features, target = (torch.randn(shape, generator=generator) for _ in range(2))
    features[0, :, 0, 0] = 0.0
    features, target = (t.to(device, dtype, memory_format=LAYOUT) for t in (features, target))
    linear, grad = (torch.rand(n, generator=generator).to(device) for n in (shape[1], shape[0]))
    results = [feature_distance_triton.distance(features, target, linear)]
    results.append(feature_distance_triton.feature_gradient(grad, features, target, linear))
    inputs = [t.double() for t in (features, target, linear)]
    expected = [feature_distance.distance(*inputs)]
    expected.append(feature_distance.feature_gradient(grad.double(), *inputs))
    assert results[1].dtype == dtype
    assert results[1].stride() == features.stride()
    # Without the position that is 0: its gradient is 1e5 times larger than those of the others.
    assert largest_error(results[1][0, :, 0, 0], expected[1][0, :, 0, 0]) < TOLERANCE[dtype]
    results[1][0, :, 0, 0] = expected[1][0, :, 0, 0] = 0.0
    compare(results, expected, dtype, f"feature distance {shape} {dtype}")


def check_operations(device: str) -> None:
    """Compare forward and backward of the operations, using the kernels, with their references."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(2, 8, 5, 6), (8,), (8,), (16, 8, 3, 3), (16,)]
    shapes += [(16,), (16,), (16, 16, 3, 3), (16,), (16, 8, 1, 1), (16,)]
    shapes += [(8,), (8,), (8, 8, 3, 3), (8,)] * 2
    x, *parameters = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    parameters, same_width = parameters[:10], parameters[10:]
    x = x.contiguous(memory_format=LAYOUT)
    tokens = [x.flatten(2).mT.contiguous() * factor for factor in (1.0, -0.5, 2.0)]
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = [
        (
            lambda h, weight, bias: group_norm_silu(h, weight, bias, 4, EPS),
            lambda h, weight, bias: group_norm_reference(h, weight, bias, 4, EPS, True),
            [x, *parameters[:2]],
        ),
        (
            lambda *tensors: norm_silu_conv(*tensors, 4, EPS),
            lambda *tensors: norm_silu_conv_reference(*tensors, 4, EPS),
            [x, *parameters[:4]],
        ),
        (
            lambda h, *rest: residual_block(h, rest, 4, EPS),
            lambda h, *rest: residual_block_reference(h, rest, 4, EPS),
            [x, *parameters],
        ),
        (
            lambda h, *rest: residual_block(h, _without_biases(rest), 0, 0.0),
            lambda h, *rest: residual_block_reference(h, _without_biases(rest), 0, 0.0),
            [x, *(parameters[i] for i in (0, 2, 3, 4, 6, 7, 8, 9))],
        ),
        (
            lambda h, *rest: residual_block(h, rest, 4, EPS),
            lambda h, *rest: residual_block_reference(h, rest, 4, EPS),
            [x, *same_width],
        ),
        (
            lambda h, *rest: residual_block(h, _without_biases(rest), 0, 0.0),
            lambda h, *rest: residual_block_reference(h, _without_biases(rest), 0, 0.0),
            [x, *(same_width[i] for i in (0, 2, 3, 4, 6, 7))],
        ),
        (attention_module.attention, attention_module.attention_reference, tokens),
    ]
    tolerance = (
        2e-5 if device == "cpu" else 5e-3
    )  # cuDNN's convolutions may use TF32 on a GPU: 2^-11 a factor
    for number, (operation, reference, tensors) in enumerate(cases):
        with triton_backends():
            inputs = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
            out = operation(*inputs)
            results = [out, *torch.autograd.grad(out.sin().sum(), inputs)]
        exact = [t.detach().double().requires_grad_() for t in tensors]
        out = reference(*exact)
        expected = [out, *torch.autograd.grad(out.sin().sum(), exact)]
        for index, pair in enumerate(zip(results, expected, strict=True)):
            error = largest_error(*pair)
            assert error < tolerance, f"operation {number}: error of result {index} is {error:.1e}"


def _without_biases(parameters: tuple[Tensor, ...]) -> list:
    """The parameters of a residual block whose norms have no biases."""
    gamma1, weight1, bias1, gamma2, *rest = parameters
    return [gamma1, None, weight1, bias1, gamma2, None, *rest]


def norm_grid(thorough: bool) -> Iterator[tuple]:
    """Arguments of check_norm after the device; the short grid is for the interpreter, which is slow."""
    for case, dtype, silu in itertools.product(NORM_CASES, TOLERANCE, (False, True)):
        if thorough or (silu and (dtype == torch.float32 or case is NORM_CASES[1])):
            yield *case, dtype, silu


def rms_grid() -> Iterator[tuple]:
    """The same for the RMS norm."""
    for case, dtype, silu in itertools.product(RMS_CASES, TOLERANCE, (False, True)):
        yield *case, dtype, silu


def attention_grid() -> Iterator[tuple]:
    """Arguments of check_attention after the device."""
    for case, dtype in itertools.product(ATTENTION_CASES, TOLERANCE):
        yield *case, dtype


def feature_grid() -> Iterator[tuple]:
    """Arguments of check_feature_distance after the device."""
    yield from itertools.product(FEATURE_CASES, TOLERANCE)


def check_all(device: str, thorough: bool) -> int:
    """Run every check; return the number of checks."""
    norms = [*norm_grid(thorough), *rms_grid()]
    attentions, features = list(attention_grid()), list(feature_grid())
    for case in norms:
        check_norm(device, *case)
    for case in attentions:
        check_attention(device, *case)
    check_row_products_of_one_token(device)
    for case in features:
        check_feature_distance(device, *case)
    check_statistics_with_a_large_mean(device)
    check_operations(device)
    return len(norms) + len(attentions) + len(features) + 1


if __name__ == "__main__":
    print(check_all("cpu", thorough=False))
