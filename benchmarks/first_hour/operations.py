"""Part 6: rates of single operations by shape, and the launch shapes and blocks that are fastest."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.first_hour.case import DEVICE, Case, Settings, computes, markdown, rounded, seconds_of
from vae.ops import attention as attention_module
from vae.ops import gpu_blocks
from vae.ops.attention import attention
from vae.ops.kernel_check import run_tests
from vae.ops.norm import group_norm_silu
from vae.system.host import GIB
from vae.training.precision import ALL_PLANS, DEFAULT_PLANS

TITLE = "Convolutions, norms and attention: rates, workspaces, launch shapes"
MIB = 2**20
BF16, LAST = torch.bfloat16, torch.channels_last
# (channels in, channels out, px) of the default network's 3x3 convolutions for an image of 1024 px
CONVOLUTIONS = [
    (3, 128, 1024),
    (8, 128, 1024),  # instead of 3: as wide as the loads of tensor cores
    (128, 128, 1024),
    (256, 128, 1024),
    (128, 3, 1024),
    (128, 8, 1024),
    (128, 256, 512),
    (256, 256, 512),
    (512, 256, 512),
    (256, 512, 256),
    (512, 512, 256),
    (512, 512, 128),
]
NORMS = [(128, 1024), (256, 512), (512, 256), (512, 128)]  # channels, px
TOKENS = (1024, 4096, 16384, 65536)
WIDTH, GROUPS, EPS = 512, 32, 1e-6

# Constants that decide the speed of our kernels, and the values to try one after another. Names that this
# version does not have are skipped.
NORM_CONSTANTS = {
    "TILE_ELEMENTS": (2048, 4096, 8192, 16384),
    "NUM_WARPS": (4, 8, 16),
    "REDUCTION_PROGRAMS": (256, 512, 1024),
    "COLUMNS": (64, 128, 256),
}
ATTENTION_QUERIES = (2, 4, 8, 16)  # at a time, for each channel


def cases(settings: Settings) -> list[Case]:
    scale = 16 if settings.quick else 1
    found = []
    for channels, out, px in CONVOLUTIONS[:: 4 if settings.quick else 1]:
        name = f"convolution {channels} to {out}, {px // scale} px"
        found.append(Case(name, 8, partial(_convolution, channels=channels, out=out, px=px // scale)))
    for channels, px in NORMS[:: 4 if settings.quick else 1]:
        name = f"norm, {channels} channels, {px // scale} px"
        found.append(Case(name, 8, partial(_norm, channels=channels, px=px // scale)))
    found.append(Case("norm, launch shapes", 90, _norm_shapes))
    for tokens in TOKENS[: 1 if settings.quick else None]:
        found.append(Case(f"attention, {tokens} tokens", 25, partial(_attention, tokens=tokens)))
    return found


def _random(*shape: int) -> Tensor:
    tensor = torch.randn(shape, device=DEVICE).to(BF16)
    return tensor.contiguous(memory_format=LAST) if len(shape) == 4 else tensor


def _convolution(settings: Settings, channels: int, out: int, px: int) -> dict[str, Any]:
    """TFLOP/s and workspace of a 3x3 convolution and of its two gradients, in bf16, channels last.

    With the first ten plans of cuDNN, as in short runs, and with all, as in long ones.
    """
    torch.backends.cudnn.benchmark = True
    h, weight, grad = _random(1, channels, px, px), _random(out, channels, 3, 3), _random(1, out, px, px)
    flops = 2 * 9 * channels * out * px**2
    arguments = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def backward(input_: bool) -> tuple[Tensor, ...]:
        return torch.ops.aten.convolution_backward(
            grad, h, weight, None, *arguments, [input_, not input_, False]
        )

    runs = {
        "forward": lambda: torch.ops.aten.convolution(h, weight, None, *arguments),
        "input gradient": lambda: backward(True),
        "weight gradient": lambda: backward(False),
    }
    found, tf32 = {}, torch.backends.cudnn.allow_tf32
    for kind, limit in (("", DEFAULT_PLANS), (", all plans", ALL_PLANS)):
        torch.backends.cudnn.benchmark_limit = limit
        # PyTorch searches again if this flag changes, and bf16 does not depend on it
        torch.backends.cudnn.allow_tf32 = tf32 != (limit == ALL_PLANS)
        for name, run in runs.items():
            started = time.perf_counter()
            workspaces = _workspaces(run)
            seconds = rounded(time.perf_counter() - started)
            found[f"{name}{kind}"] = {**workspaces, "search_seconds": seconds, **_rate(run, flops)}
    torch.backends.cudnn.benchmark_limit, torch.backends.cudnn.allow_tf32 = DEFAULT_PLANS, tf32
    return found


def _rate(run: Callable[[], Any], flops: float) -> dict[str, float]:
    seconds = seconds_of(run)
    return {"ms": rounded(seconds * 1e3), "tflops": rounded(flops / seconds / 1e12)}


def _workspaces(run: Callable[[], Any]) -> dict[str, float]:
    """MiB that the first call (with cuDNN's search) and a later one need in addition to their results."""
    found = {}
    for name in ("search_mib", "workspace_mib"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        results = torch.cuda.memory_allocated() - before
        found[name] = round((torch.cuda.max_memory_allocated() - before - results) / MIB)
        del result
    return found


def _both_directions(call: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, float]:
    """Milliseconds of forward, and of forward and backward."""
    with torch.no_grad():
        forward = seconds_of(call)
    grad = torch.ones_like(call())
    both = seconds_of(lambda: torch.autograd.grad(call(), leaves, grad))
    return {"forward_ms": rounded(forward * 1e3), "both_ms": rounded(both * 1e3)}


def _norm(settings: Settings, channels: int, px: int) -> dict[str, Any]:
    """GB/s of GroupNorm and SiLU: forward moves the map 3 times, backward 5 times."""
    found = _time_norm(channels, px)
    size = 2 * channels * px**2
    backward = found["both_ms"] - found["forward_ms"]
    rates = {"forward_gb_s": 3 * size / found["forward_ms"], "backward_gb_s": 5 * size / max(backward, 1e-9)}
    return {**found, **{name: rounded(rate / 1e6) for name, rate in rates.items()}}


def _time_norm(channels: int, px: int) -> dict[str, float]:
    h = _random(1, channels, px, px).requires_grad_()
    weight, bias = (torch.ones(channels, device=DEVICE, requires_grad=True) for _ in range(2))
    return _both_directions(lambda: group_norm_silu(h, weight, bias, GROUPS, EPS), [h, weight, bias])


def _norm_shapes(settings: Settings) -> dict[str, Any]:
    """The fastest value of each constant, one constant after another, over all norms of the network."""
    shapes = [(128, 64)] if settings.quick else NORMS
    names = [name for name in NORM_CONSTANTS if hasattr(gpu_blocks, name)]
    best = {name: getattr(gpu_blocks, name) for name in names}
    start, tried = dict(best), []
    for name in names[: 1 if settings.quick else None]:
        for value in NORM_CONSTANTS[name][: 2 if settings.quick else None]:
            candidate = {**best, name: value}
            if settings.seconds_left < 20 or any(row["constants"] == candidate for row in tried):
                continue
            tried.append({"constants": candidate, **_try(candidate, shapes)})
        timed = [row for row in tried if "ms" in row]
        if tried and not timed:
            raise RuntimeError(tried[0]["error"])
        best = min(timed, key=lambda row: row["ms"])["constants"] if timed else best
    return {"tried": tried, "start": start, "best": best if computes() else start}


def _try(candidate: dict[str, int], shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Milliseconds of all shapes in both directions; an error if a kernel is wrong or does not fit."""
    with patch.multiple(gpu_blocks, **candidate):
        for channels, px in shapes:
            blocks = gpu_blocks.norm_blocks(1, channels, px**2, GROUPS)
            if blocks.shared_memory_bytes > gpu_blocks.SHARED_MEMORY_BYTES:
                return {"error": "more shared memory than a card has"}
        broken = [str(o) for o in run_tests(DEVICE, [BF16]) if o.key.operation == "norm" and o.is_broken]
        if broken:
            return {"error": broken[0]}
        return {"ms": rounded(sum(_time_norm(channels, px)["both_ms"] for channels, px in shapes))}


def _attention(settings: Settings, tokens: int) -> dict[str, Any]:
    """Ours by queries at a time, forward and backward of one head of 512 channels (PyTorch's: part 7)."""
    q, k, v = (_random(1, tokens, WIDTH).requires_grad_() for _ in range(3))
    found: dict[str, Any] = {}
    for queries in ATTENTION_QUERIES:
        with patch.object(attention_module, "QUERIES_PER_CHANNEL", queries):
            torch.cuda.reset_peak_memory_stats()
            found[f"{queries} queries per channel"] = {
                **_both_directions(lambda: attention(q, k, v), [q, k, v]),
                "peak_gib": rounded(torch.cuda.max_memory_allocated() / GIB),
            }
    flops = 2 * tokens**2 * WIDTH
    for row in found.values():
        row["forward_tflops"] = rounded(2 * flops / row["forward_ms"] / 1e9)
        row["both_tflops"] = rounded(7 * flops / row["both_ms"] / 1e9)
    return found


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Tables of convolutions, norms, launch shapes and attention."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for name, found in results.items():
        groups.setdefault(name.split(",")[0].split()[0], {})[name] = found
    shapes = groups.get("norm", {}).pop("norm, launch shapes", None)
    lines = []
    for kind, rows in groups.items():
        lines += [*TABLES[kind](rows), ""]
    if shapes:
        rows = [
            [_constants(row["constants"]), row.get("ms"), row.get("error", "")] for row in shapes["tried"]
        ]
        lines += markdown(["launch shape of norms", "ms", ""], rows)
        lines += ["", f"Chosen: {_constants(shapes['best'])}."]
    return lines


def _constants(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _convolution_table(results: dict[str, dict[str, Any]]) -> list[str]:
    kinds = ("forward", "input gradient", "weight gradient")
    ways = [*kinds, *(f"{kind}, all plans" for kind in kinds)]
    rows = []
    for name, found in results.items():
        cells = [
            f"{found[way]['tflops']} ({found[way]['workspace_mib']}, {found[way]['search_mib']})"
            for way in ways
        ]
        rows.append([name.removeprefix("convolution "), *cells])
    return ["TFLOP/s (MiB of workspace, and of cuDNN's search):", "", *markdown(["convolution", *ways], rows)]


def _norm_table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [[name, found["forward_gb_s"], found["backward_gb_s"]] for name, found in results.items()]
    return markdown(["GroupNorm and SiLU", "forward, GB/s", "backward, GB/s"], rows)


def _attention_table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, found in results.items():
        for kind, row in found.items():
            rows.append([name, kind, row["forward_tflops"], row["both_tflops"], row["peak_gib"]])
    return markdown(["", "block", "forward, TFLOP/s", "both, TFLOP/s", "peak GiB"], rows)


TABLES = {
    "convolution": _convolution_table,
    "norm": _norm_table,
    "attention": _attention_table,
}
