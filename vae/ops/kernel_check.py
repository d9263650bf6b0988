"""A test of the Triton kernels on this card: each is compared with the PyTorch code that can replace it.

Nobody can try all cards, drivers and versions of Triton. So every command tests the kernels when it starts,
on small tensors, and continues without those that fail.

A training run also tests the shapes of its own steps (vae.training.precision): channels, groups, widths
and numbers of tokens. It tests them with one image, 16 queries and at most MAX_ELEMENTS of a tensor, because
more of these are more programs of the same code. Offsets beyond MAX_ELEMENTS, the widths of --buckets and
images of other sizes in validations are not covered.
"""

import importlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vae.ops import library
from vae.ops.library import KERNEL_KEYS, REPLACED, KernelKey
from vae.ops.norm import Norm
from vae.system import console
from vae.system.errors import UserError

# Largest difference over largest value. The relative rounding error of one number is 2**-9 in bf16 and 2**-12
# in fp16 (half a unit in the last place); inputs, results and gradients are each rounded, so results differ
# by a few times that. A wrong kernel differs by about 1.
TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 1e-4}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# The dtypes of the ends of encoder and decoder: see vae.ops.fused_conv.
END_DTYPES = {torch.bfloat16: (torch.float16, torch.float32), torch.float16: (torch.float32,)}

EPS = 1e-6
QUERIES = 16  # rows of attention scores
NOTE_SECONDS = 3.0  # tests of compiled kernels take 1 s, compiling them 15 to 40 s
MAX_ELEMENTS = 2**24  # of one tensor; a test needs about 1 GiB for it, because its reference is fp64


class NormShape(NamedTuple):
    """Features of one image, and their norm."""

    channels: int
    height: int
    width: int
    groups: int  # 0: RMS norm
    silu: bool
    has_h_bias: bool

    @property
    def operation(self) -> str:
        return "norm" if self.groups else "rms_norm"


class AttentionShape(NamedTuple):
    """The tokens of one image."""

    tokens: int
    channels: int

    @property
    def operation(self) -> str:
        return "attention"


class FeatureShape(NamedTuple):
    """Features of one image that are compared with those of another."""

    channels: int
    height: int
    width: int

    @property
    def operation(self) -> str:
        return "feature_distance"


Shape = NormShape | AttentionShape | FeatureShape

# The top level's width, with the tiles of real images, and with so many tiles that a program of a reduction
# processes several of them (vae.ops.library); each row of scores has several tiles and a remainder.
SHAPES: tuple[Shape, ...] = (
    NormShape(128, 192, 256, groups=32, silu=True, has_h_bias=True),
    NormShape(128, 192, 256, groups=32, silu=False, has_h_bias=False),
    AttentionShape(5000, 512),
    FeatureShape(64, 24, 24),
    NormShape(96, 192, 256, groups=0, silu=True, has_h_bias=True),
    NormShape(96, 192, 256, groups=0, silu=False, has_h_bias=False),
)

MODULES = {  # the reference, which computes tensors in fp64 with PyTorch, and the kernels
    "norm": ("vae.ops.norm", "vae.ops.norm_triton"),
    "attention": ("vae.ops.attention", "vae.ops.attention_triton"),
    "feature_distance": ("vae.losses.feature_distance", "vae.losses.feature_distance_triton"),
    "rms_norm": ("vae.ops.norm", "vae.ops.rms_norm_triton"),
}

_tested: set[tuple[torch.device, torch.dtype]] = set()  # in this process
_broken: set[KernelKey] = set()

Call = Callable[..., tuple[Tensor, ...]]


class Outcome(NamedTuple):
    """The test of one kernel."""

    key: KernelKey
    kernel: str  # name of the function that launches it
    difference: float  # from its reference, relative
    error: str | None = None  # if it raised
    shape: Shape | None = None

    @property
    def is_broken(self) -> bool:
        return not self.difference <= TOLERANCE[self.key.dtype]  # also if it is NaN

    def __str__(self) -> str:
        problem = f"differs from its PyTorch reference by {self.difference:.1e}"
        problem = f"raised {self.error}" if self.error else problem
        of_shape = f" (of {self.shape})" if self.shape else ""
        return f"{self.kernel} ({DTYPE_NAMES[self.key.dtype]}) {problem}{of_shape}"


def choose_kernels(
    wanted: str,
    device: torch.device,
    dtypes: Iterable[torch.dtype],
    share: Callable[[set[Outcome]], set[Outcome]] = lambda outcomes: outcomes,
    shapes: Callable[[], Collection[Shape]] = tuple,
) -> None:
    """Decide which operations run as Triton kernels in this process, for --kernels `wanted`, and how.

    "auto" replaces each kernel that fails in fp32 or one of `dtypes` by PyTorch operations, and prints one
    line. "triton" raises UserError instead. `share` returns the union of the outcomes of all processes, so
    that all decide the same. `shapes` returns those of the command's own tensors, to be tested in `dtypes`.
    On a CPU nothing is tested and nothing changes.
    """
    dtypes = tuple(dtypes)
    REPLACED.clear()
    if wanted == "torch":
        REPLACED.update(KERNEL_KEYS)
        return
    if not library.runs_kernels(device):
        _explain_missing(wanted, device)
        return
    new = {dtype for dtype in (*dtypes, torch.float32) if (device, dtype) not in _tested}
    outcomes = _with_note(chain(run_tests(device, new), run_tests(device, dtypes, shapes())), dtypes)
    own = {outcome for outcome in outcomes if outcome.is_broken}
    broken = sorted(share(own), key=lambda o: (o.key.operation, KERNEL_KEYS.index(o.key)))
    _broken.update(outcome.key for outcome in broken)
    if broken and wanted == "triton":
        raise UserError(f"--kernels triton: {'; '.join(_lines(broken, device))}: use --kernels auto")
    _tested.update((device, dtype) for dtype in new)
    REPLACED.update(_broken)
    for line in _lines(broken, device):
        console.warning(f"{line}. PyTorch operations replace it: slower, with the same results")


def _with_note(outcomes: Iterator[Outcome], dtypes: tuple[torch.dtype, ...]) -> Iterator[Outcome]:
    """The outcomes, and one line if they take long: compiled kernels take about a second."""
    begun, is_noted = time.monotonic(), False
    for outcome in outcomes:
        yield outcome
        if not is_noted and time.monotonic() - begun > NOTE_SECONDS:
            is_noted = True
            names = " and ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
            console.info(f"testing Triton kernels for {names}: up to a minute if they are not compiled yet")


def _explain_missing(wanted: str, device: torch.device) -> None:
    on_card = device.type == "cuda"
    reason = "Triton is not installed" if on_card else f"a device of type {device.type} has none"
    if wanted == "triton":
        raise UserError(f"--kernels triton: {reason}: use --kernels auto")
    if on_card:
        console.warning(f"{reason}: PyTorch operations replace our kernels, slower")


def _lines(broken: list[Outcome], device: torch.device) -> Iterator[str]:
    """One line for each operation with a broken kernel."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    for operation, outcomes in groupby(broken, lambda outcome: outcome.key.operation):
        first, *others = outcomes
        more = f" (and {len(others)} more)" if others else ""
        yield f"the Triton kernels of {operation} fail on {card}: {first}{more}"


def run_tests(
    device: torch.device, dtypes: Iterable[torch.dtype], shapes: Collection[Shape] = SHAPES
) -> Iterator[Outcome]:
    """Test the kernels of each operation and dtype, up to the first one that is broken."""
    wanted = set(dtypes)
    for key in KERNEL_KEYS:
        if key.dtype in wanted:
            for outcome in _test_operation(key, device, shapes):
                yield outcome
                if outcome.is_broken:
                    break


def _test_operation(key: KernelKey, device: torch.device, shapes: Collection[Shape]) -> Iterator[Outcome]:
    """Test each kernel with each shape; direct launches end if they are what fails."""
    for shape in shapes:
        if shape.operation != key.operation:
            continue
        for kernel, call, inputs in _CASES[type(shape)](shape, key.dtype, device):
            outcome = _test(key, shape, kernel, call, inputs)
            if outcome.is_broken and library.direct_launches and device.type == "cuda":
                library.direct_launches = False
                again = _test(key, shape, kernel, call, inputs)
                library.direct_launches = again.is_broken
                if not again.is_broken:
                    console.warning(f"{outcome}: Triton itself launches our kernels, which takes longer")
                    outcome = again
            yield outcome


def _test(key: KernelKey, shape: Shape, kernel: str, call: Call, inputs: list[Tensor]) -> Outcome:
    """Run a kernel on copies of `inputs`, and its reference on the same values in fp64."""
    reference, kernels = MODULES[key.operation]
    try:
        expected = call(importlib.import_module(reference), *(t.double() for t in inputs))
        for _ in range(2):  # the second launch is the direct one (vae.ops.library.launch)
            results = call(importlib.import_module(kernels), *(t.clone() for t in inputs))
        pairs = zip(results, expected, strict=True)
        differences = [(a.double() - b).abs().max() / b.abs().max() for a, b in pairs]
        return Outcome(key, kernel, torch.stack(differences).max().item(), shape=shape)
    except torch.OutOfMemoryError:
        raise UserError("the card has no free memory: end other programs (nvidia-smi lists them)") from None
    except Exception as error:  # the driver, the compiler and PyTorch each raise their own types
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        _check_device(inputs[0].device, kernel, text)
        return Outcome(key, kernel, math.inf, text, shape)


def _check_device(device: torch.device, kernel: str, text: str) -> None:
    """Raise UserError if the error has ended all work of this process on the card."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        raise UserError(
            f"the test of the Triton kernel {kernel} ended with {text}, after which this process cannot use "
            "the card: start again with --kernels torch"
        ) from None


Cases = Iterator[tuple[str, Call, list[Tensor]]]  # kernel name, call and inputs


def _norm_cases(shape: NormShape, dtype: torch.dtype, device: torch.device) -> Cases:
    """The calls work for vae.ops.norm, and for norm_triton or rms_norm_triton."""
    draw, channels, groups = _draw(device), shape.channels, shape.groups
    rows = _rows(shape.height, channels * shape.width)
    sizes = (1, channels, rows, shape.width)
    h, grad, skip = (draw(*sizes).to(dtype, memory_format=torch.channels_last) for _ in range(3))
    names = ["weight", *["bias"] * (groups > 0), *["h_bias"] * shape.has_h_bias]
    parameters = [draw(channels) for _ in names]
    statistics = h.new_empty(0)
    if groups:
        variance, mean = torch.var_mean(h.float().unflatten(1, (groups, -1)), dim=(2, 3, 4), correction=0)
        statistics = torch.stack((mean, (variance + EPS).rsqrt()))

    def norm(*given: Tensor) -> Norm:
        named: dict[str, Any] = {"bias": None} | dict(zip(names, given, strict=True))
        return Norm(**named, groups=groups, eps=EPS, silu=shape.silu)

    def with_statistics(ops: ModuleType, h: Tensor, *t: Tensor) -> tuple[Tensor, ...]:
        out, statistics = ops.normalize_with_statistics(h, norm(*t))
        return out, *statistics  # mean and rstd

    def normalize(ops: ModuleType, h: Tensor, statistics: Tensor, *t: Tensor) -> tuple[Tensor, ...]:
        return (ops.normalize(h, statistics, norm(*t)),)

    def backward(ops: ModuleType, *t: Tensor, skip: Tensor | None = None) -> tuple[Tensor, ...]:
        features, given = t[:3], t[3:]
        grads = ops.normalize_backward(*features, norm(*given), skip=skip)
        return tuple(grad for grad in grads if grad is not None)[: 1 + len(given) + (skip is not None)]

    def with_skip(ops: ModuleType, skip: Tensor, *t: Tensor) -> tuple[Tensor, ...]:
        return backward(ops, *t, skip=skip)

    def end(ops: ModuleType, h: Tensor, *t: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, ...]:
        return ops.normalize_with_statistics(h, norm(*t)._replace(silu=True, out_dtype=out_dtype))[:1]

    yield "normalize_with_statistics", with_statistics, [h, *parameters]
    if not shape.has_h_bias:
        for out_dtype in END_DTYPES.get(dtype, ()):
            name = f"normalize_with_statistics to {DTYPE_NAMES[out_dtype]}"
            yield name, partial(end, out_dtype=out_dtype), [h, *parameters]
    yield "normalize", normalize, [h, statistics, *parameters]
    yield "normalize_backward", backward, [grad, h, statistics, *parameters]
    if not shape.has_h_bias:  # as the start of a residual block
        yield "normalize_backward with skip", with_skip, [skip, grad, h, statistics, *parameters]
    elif groups:  # as its end, which has a convolution with bias there
        yield "add_with_bias", lambda ops, *t: (ops.add_with_bias(*t),), [h, grad, parameters[-1]]


def _attention_cases(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Cases:
    """The calls work for vae.ops.attention and attention_triton, whose functions overwrite arguments."""
    draw, sizes = _draw(device), (1, QUERIES, shape.tokens)
    scores, others = draw(*sizes), draw(*sizes)
    weights, products = (torch.empty(sizes, dtype=dtype, device=device) for _ in range(2))
    log_sums, deltas = scores.logsumexp(-1), draw(*sizes[:2])

    def softmax_step(ops: ModuleType, *tensors: Tensor) -> tuple[Tensor, ...]:
        ops.softmax_step(*tensors)
        return tensors[1:]

    def gradient_step(ops: ModuleType, *tensors: Tensor) -> tuple[Tensor, ...]:
        ops.gradient_step(*tensors, shape.channels**-0.5)
        return tensors[2:4]

    def row_products(ops: ModuleType, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        ops.row_products(a, b, out)
        return (out,)

    yield "softmax_step", softmax_step, [scores, weights, *(torch.empty_like(log_sums) for _ in range(2))]
    yield "gradient_step", gradient_step, [scores, others, weights, products, log_sums, deltas]
    a, b = (draw(*sizes[:2], shape.channels).to(dtype) for _ in range(2))
    yield "row_products", row_products, [a, b, torch.empty_like(deltas)]


def _distance_cases(shape: FeatureShape, dtype: torch.dtype, device: torch.device) -> Cases:
    """The calls work for vae.losses.feature_distance and feature_distance_triton."""
    draw, images = _draw(device), 2
    rows = _rows(shape.height, images * shape.channels * shape.width)
    sizes = (images, shape.channels, rows, shape.width)
    maps = [draw(*sizes).to(dtype, memory_format=torch.channels_last) for _ in range(2)]
    linear, grad = draw(shape.channels).abs(), draw(images)
    yield "distance", lambda ops, *t: (ops.distance(*t),), [*maps, linear]
    yield "feature_gradient", lambda ops, *t: (ops.feature_gradient(*t),), [grad, *maps, linear]


_CASES: dict[type, Callable[..., Cases]] = {
    NormShape: _norm_cases,
    AttentionShape: _attention_cases,
    FeatureShape: _distance_cases,
}


def _rows(height: int, row_elements: int) -> int:
    """The number of rows of a tensor that are tested."""
    return max(1, min(height, MAX_ELEMENTS // row_elements))


def _draw(device: torch.device) -> Callable[..., Tensor]:
    """A function that draws normal numbers of a given shape, always the same."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device)
