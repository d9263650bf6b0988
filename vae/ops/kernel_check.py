"""Whether the Triton kernels work on this card: each is compared with the PyTorch code that can replace it.

Nobody can try all cards, drivers and versions of Triton. So every command tests the kernels when it starts,
on small tensors, and continues without those that fail.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from types import ModuleType
from typing import NamedTuple

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

# (B, C, H, W): one image of the top level's width, with the tiles of real images, and with so many tiles that
# a program of a reduction processes several of them (vae.ops.gpu_blocks).
NORM_SHAPE = (1, 128, 192, 256)
GROUPS, EPS = 32, 1e-6
SCORES_SHAPE = (1, 16, 5000)  # (images, queries, keys): a row of keys has several tiles, and a remainder
WIDTH = 512  # of the model's attention
FEATURES_SHAPE = (2, 64, 24, 24)  # (B, C, h, w)

MODULES = {  # with the endings _triton and _torch
    "norm": "vae.ops.norm",
    "attention": "vae.ops.attention",
    "feature_distance": "vae.losses.feature_distance",
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

    @property
    def is_broken(self) -> bool:
        return not self.difference <= TOLERANCE[self.key.dtype]  # also if it is NaN

    def __str__(self) -> str:
        problem = f"differs from its PyTorch reference by {self.difference:.1e}"
        problem = f"raised {self.error}" if self.error else problem
        return f"{self.kernel} ({DTYPE_NAMES[self.key.dtype]}) {problem}"


def choose_kernels(
    wanted: str,
    device: torch.device,
    dtypes: Iterable[torch.dtype],
    share: Callable[[set[Outcome]], set[Outcome]] = lambda outcomes: outcomes,
) -> None:
    """Decide which operations run as Triton kernels in this process, for --kernels `wanted`, and how.

    "auto" replaces each kernel that fails in fp32 or one of `dtypes` by PyTorch operations, and prints one
    line. "triton" raises UserError instead. `share` returns the union of the outcomes of all processes, so
    that all decide the same. On a CPU nothing is tested and nothing changes.
    """
    REPLACED.clear()
    if wanted == "torch":
        REPLACED.update(KERNEL_KEYS)
        return
    if not library.runs_kernels(device):
        _explain_missing(wanted, device)
        return
    new = {dtype for dtype in (*dtypes, torch.float32) if (device, dtype) not in _tested}
    own = {outcome for outcome in run_tests(device, new) if outcome.is_broken}
    broken = sorted(share(own), key=lambda o: (o.key.operation, KERNEL_KEYS.index(o.key)))
    _broken.update(outcome.key for outcome in broken)
    if broken and wanted == "triton":
        raise UserError(f"--kernels triton: {'; '.join(_lines(broken, device))}: use --kernels auto")
    _tested.update((device, dtype) for dtype in new)
    REPLACED.update(_broken)
    for line in _lines(broken, device):
        console.warning(f"{line}. PyTorch operations replace it: slower, with the same results")


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


def run_tests(device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Outcome]:
    """Test the kernels of each operation and dtype, up to the first one that is broken."""
    wanted = set(dtypes)
    for key in KERNEL_KEYS:
        if key.dtype in wanted:
            for kernel, call, inputs in _CASES[key.operation](key, device):
                outcome = _test(key, kernel, call, inputs)
                yield outcome
                if outcome.is_broken:
                    break


def _test(key: KernelKey, kernel: str, call: Call, inputs: list[Tensor]) -> Outcome:
    """Run a kernel on copies of `inputs`, and its reference on the same values in fp64."""
    name = MODULES[key.operation]
    expected = call(importlib.import_module(f"{name}_torch"), *(t.double() for t in inputs))
    try:
        for _ in range(2):  # the second launch is the direct one (vae.ops.library.launch)
            found = call(importlib.import_module(f"{name}_triton"), *(t.clone() for t in inputs))
        pairs = zip(found, expected, strict=True)
        differences = [(a.double() - b).abs().max() / b.abs().max() for a, b in pairs]
        return Outcome(key, kernel, torch.stack(differences).max().item())
    except torch.OutOfMemoryError:
        raise UserError("the card has no free memory: end other programs (nvidia-smi lists them)") from None
    except Exception as error:  # the driver, the compiler and PyTorch each raise their own types
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        _check_device(inputs[0].device, kernel, text)
        return Outcome(key, kernel, math.inf, text)


def _check_device(device: torch.device, kernel: str, text: str) -> None:
    """Raise UserError if the error has ended all work of this process on the card."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        raise UserError(
            f"the test of the Triton kernel {kernel} ended with {text}, after which this process cannot use "
            "the card: start again with --kernels torch"
        ) from None


def _norm_cases(key: KernelKey, device: torch.device) -> Iterator[tuple[str, Call, list[Tensor]]]:
    """Kernel name, call and inputs; the call works for vae.ops.norm_triton and norm_torch."""
    draw = _draw(device)
    h, grad = (draw(*NORM_SHAPE).to(key.dtype, memory_format=torch.channels_last) for _ in range(2))
    weight, bias = draw(NORM_SHAPE[1]), draw(NORM_SHAPE[1])
    variance, mean = torch.var_mean(h.float().unflatten(1, (GROUPS, -1)), dim=(2, 3, 4), correction=0)
    statistics, h_bias = torch.stack((mean, (variance + EPS).rsqrt())), draw(NORM_SHAPE[1])

    def norm(*biases: Tensor, silu: bool) -> Norm:  # weight and bias, and h_bias or not
        return Norm(biases[0], biases[1], GROUPS, EPS, silu, biases[2] if len(biases) > 2 else None)

    for silu, given in ((True, [weight, bias, h_bias]), (False, [weight, bias])):

        def with_statistics(ops: ModuleType, *t: Tensor, silu: bool = silu) -> tuple[Tensor, ...]:
            out, statistics = ops.normalize_with_statistics(t[0], norm(*t[1:], silu=silu))
            return out, *statistics  # mean and rstd

        def normalize(ops: ModuleType, *t: Tensor, silu: bool = silu) -> tuple[Tensor, ...]:
            return (ops.normalize(*t[:2], norm(*t[2:], silu=silu)),)

        def backward(ops: ModuleType, *t: Tensor, silu: bool = silu) -> tuple[Tensor, ...]:
            return ops.normalize_backward(*t[:3], norm(*t[3:], silu=silu))[: len(t) - 2]

        yield "normalize_with_statistics", with_statistics, [h, *given]
        yield "normalize", normalize, [h, statistics, *given]
        yield "normalize_backward", backward, [grad, h, statistics, *given]
    if key.dtype == torch.bfloat16:  # at the ends of the network: vae.ops.fused_conv

        def to_fp16(ops: ModuleType, *t: Tensor) -> tuple[Tensor, ...]:
            end = norm(*t[1:], silu=True)._replace(out_dtype=torch.float16)
            return ops.normalize_with_statistics(t[0], end)[:1]

        yield "normalize_with_statistics to fp16", to_fp16, [h, weight, bias]
    yield "add_with_bias", lambda ops, *t: (ops.add_with_bias(*t),), [h, grad, h_bias]


def _attention_cases(key: KernelKey, device: torch.device) -> Iterator[tuple[str, Call, list[Tensor]]]:
    """The same for vae.ops.attention_triton and attention_torch, whose functions overwrite arguments."""
    draw = _draw(device)
    scores, others = draw(*SCORES_SHAPE), draw(*SCORES_SHAPE)
    weights, products = (torch.empty(SCORES_SHAPE, dtype=key.dtype, device=device) for _ in range(2))
    log_sums, deltas = scores.logsumexp(-1), draw(*SCORES_SHAPE[:2])

    def softmax_step(ops: ModuleType, *tensors: Tensor) -> tuple[Tensor, ...]:
        ops.softmax_step(*tensors)
        return tensors[1:]

    def gradient_step(ops: ModuleType, *tensors: Tensor) -> tuple[Tensor, ...]:
        ops.gradient_step(*tensors, WIDTH**-0.5)
        return tensors[2:4]

    def row_products(ops: ModuleType, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        ops.row_products(a, b, out)
        return (out,)

    yield "softmax_step", softmax_step, [scores, weights, *(torch.empty_like(log_sums) for _ in range(2))]
    yield "gradient_step", gradient_step, [scores, others, weights, products, log_sums, deltas]
    a, b = (draw(*SCORES_SHAPE[:2], WIDTH).to(key.dtype) for _ in range(2))
    yield "row_products", row_products, [a, b, torch.empty_like(deltas)]


def _distance_cases(key: KernelKey, device: torch.device) -> Iterator[tuple[str, Call, list[Tensor]]]:
    """The same for vae.losses.feature_distance_triton and feature_distance_torch."""
    draw = _draw(device)
    maps = [draw(*FEATURES_SHAPE).to(key.dtype, memory_format=torch.channels_last) for _ in range(2)]
    linear, grad = draw(FEATURES_SHAPE[1]).abs(), draw(FEATURES_SHAPE[0])
    yield "distance", lambda ops, *t: (ops.distance(*t),), [*maps, linear]
    yield "feature_gradient", lambda ops, *t: (ops.feature_gradient(*t),), [grad, *maps, linear]


_CASES = {"norm": _norm_cases, "attention": _attention_cases, "feature_distance": _distance_cases}


def _draw(device: torch.device) -> Callable[..., Tensor]:
    """A function that draws normal numbers of a given shape, always the same."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device)
