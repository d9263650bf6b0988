"""Cases 7 to 10: single operations and LPIPS, forward and backward, compared with those of diffusers' model.

Shapes: B images, C channels, H x W pixels, N tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.comparison.cuda_rules import CudaRules
from benchmarks.comparison.measuring import Contestant, Stopwatch, counted, saved_bytes
from benchmarks.comparison.ours import Ours
from benchmarks.comparison.theirs import build_lpips
from benchmarks.comparison.work import SEED, Work
from vae.losses.perceptual import build_perceptual
from vae.ops.attention import attention
from vae.ops.norm import group_norm_silu
from vae.ops.resample import upsample_conv

META = torch.device("meta")
NORM_CHANNELS, GROUPS, EPS = 128, 32, 1e-6
UPSAMPLE_CHANNELS = 256
ATTENTION_WIDTH = 512


@dataclass(frozen=True)
class Setting:
    """Dtype and memory layout of the input; our parameters are fp32, as in training."""

    dtype: torch.dtype
    channels_last: bool

    @property
    def name(self) -> str:
        return f"{'bf16' if self.dtype == torch.bfloat16 else 'fp32'}{' channels_last' * self.channels_last}"

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


SETTINGS = [Setting(dtype, last) for dtype in (torch.bfloat16, torch.float32) for last in (False, True)]
BF16_SETTINGS = SETTINGS[:2]


def _random(shape: tuple[int, ...], device: torch.device, scale: float = 1.0) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, device=device)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(SEED)) * scale).to(device)


def _forward_backward(operation: Callable, leaves: list[torch.Tensor]) -> Callable[[], None]:
    """A function that runs `operation`, and its backward to `leaves` from a fixed gradient."""
    grad = None

    def run() -> None:
        nonlocal grad
        out = operation()
        if grad is None:
            grad = torch.ones_like(out)
        torch.autograd.grad(out, leaves, grad)

    return run


def _operation(
    kind: Callable, shape: tuple[int, ...], setting: Setting, device: torch.device, mine: bool
) -> tuple[Callable, list[torch.Tensor], list[torch.Tensor]]:
    """The call, the leaves that get gradients, and the parameters among them."""
    h = _random(shape, device).to(setting.dtype, memory_format=setting.layout).requires_grad_()
    parameters = [p.to(torch.float32 if mine else setting.dtype) for p in kind.parameters(shape[1], device)]
    parameters = [p.contiguous(memory_format=setting.layout) if p.dim() == 4 else p for p in parameters]
    parameters = [p.requires_grad_() for p in parameters]
    call = kind.ours if mine else kind.theirs
    return lambda: call(h, *parameters), [h, *parameters], parameters


class NormSilu:
    """GroupNorm with 32 groups, then SiLU."""

    @staticmethod
    def parameters(channels: int, device: torch.device) -> list[torch.Tensor]:
        return [_random((channels,), device), _random((channels,), device)]

    @staticmethod
    def ours(h, weight, bias):
        return group_norm_silu(h, weight, bias, GROUPS, EPS)

    @staticmethod
    def theirs(h, weight, bias):
        return F.silu(F.group_norm(h, GROUPS, weight, bias, EPS))


class UpsampleConv:
    """Nearest-neighbor upsampling by two, then a 3x3 convolution."""

    @staticmethod
    def parameters(channels: int, device: torch.device) -> list[torch.Tensor]:
        return [_random((channels, channels, 3, 3), device, 0.02), _random((channels,), device, 0.02)]

    ours = staticmethod(upsample_conv)

    @staticmethod
    def theirs(h, weight, bias):
        return F.conv2d(F.interpolate(h, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)


def _compare(
    stopwatch: Stopwatch, kind: Callable, channels: int, sides: tuple[int, int], settings: list[Setting]
) -> dict[str, Any]:
    """Compare both sides at each setting, and the fastest bf16 setting of each side.

    `sides` are those of the square map for timing, and for counting (there parameters are negligible).
    """
    shape, counted_shape = ((1, channels, side, side) for side in sides)
    contestants, facts = [], {}
    for setting in settings:
        for side, mine in (("ours", True), ("theirs", False)):
            name = f"{'ours' if mine else 'PyTorch'} {setting.name}"

            def build(setting=setting, mine=mine):
                call, leaves, _ = _operation(kind, shape, setting, stopwatch.device, mine)
                return _forward_backward(call, leaves)

            contestants.append(Contestant(name, build))
            call, _, parameters = _operation(kind, counted_shape, setting, META, mine)
            facts[name] = {"side": side, "saved_bytes": saved_bytes(call, parameters)}
    autocast_call, _, parameters = _operation(kind, counted_shape, SETTINGS[0], META, False)
    with CudaRules(autocast=True):
        autocast_saved = saved_bytes(autocast_call, parameters)
    measured = stopwatch.compare(contestants)
    rows = {name: {**facts[name], **m.as_dict()} for name, m in measured.items()}
    last = BF16_SETTINGS[-1].name
    saved = rows[f"ours {last}"]["saved_bytes"]
    found = {"shape": list(shape), "saved_at": list(counted_shape), "contestants": rows}
    found["saved"] = {
        f"ours / PyTorch {last}": round(saved / rows[f"PyTorch {last}"]["saved_bytes"], 4),
        "ours / PyTorch under CUDA's bf16 autocast": round(saved / autocast_saved, 4),
    }
    found["speed_like_for_like"] = {
        s.name: round(measured[f"PyTorch {s.name}"].median / measured[f"ours {s.name}"].median, 3)
        for s in settings
        if measured[f"PyTorch {s.name}"].seconds and measured[f"ours {s.name}"].seconds
    }
    return found | _best({s.name for s in BF16_SETTINGS}, measured)


def _best(names: set[str], measured: dict) -> dict[str, Any]:
    fastest = {}
    for side in ("ours", "PyTorch"):
        timed = [m for n in sorted(names) if (m := measured[f"{side} {n}"]).seconds]
        if not timed:
            return {}
        fastest[side] = min(timed, key=lambda m: m.median)
    ratio = fastest["PyTorch"].median / fastest["ours"].median
    sides = {"ours": fastest["ours"].name, "theirs": fastest["PyTorch"].name}
    return {"speed": round(ratio, 3), "fastest": sides}


def compare_norm_silu(stopwatch: Stopwatch, sides: tuple[int, int]) -> dict[str, Any]:
    """Case 7."""
    return _compare(stopwatch, NormSilu, NORM_CHANNELS, sides, BF16_SETTINGS)


def compare_upsample(stopwatch: Stopwatch, sides: tuple[int, int]) -> dict[str, Any]:
    """Case 8: upsamples a map of `sides` px by two."""
    settings = SETTINGS if stopwatch.device.type == "cpu" else BF16_SETTINGS
    return _compare(stopwatch, UpsampleConv, UPSAMPLE_CHANNELS, sides, settings)


def _attention_run(device: torch.device, tokens: int, mine: bool) -> Callable:
    shape = (1, tokens, ATTENTION_WIDTH)
    q, k, v = (_random(shape, device).to(torch.bfloat16).requires_grad_() for _ in range(3))
    if mine:
        return _forward_backward(lambda: attention(q, k, v), [q, k, v])

    def theirs() -> torch.Tensor:  # as in their attention processor, with one head
        heads = (t.view(1, tokens, 1, ATTENTION_WIDTH).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(shape)

    return _forward_backward(theirs, [q, k, v])


def compare_attention(
    stopwatch: Stopwatch, token_counts: tuple[int, ...], counted_at: tuple[int, ...]
) -> dict[str, Any]:
    """Case 9; on meta, theirs is CUDA's memory-efficient kernel, because it supports this width."""
    found: dict[str, Any] = {"width": ATTENTION_WIDTH, "contestants": {}, "speed": {}, "memory": {}}
    for tokens in token_counts:
        sides = {"ours": True, "theirs": False}
        contestants = [
            Contestant(side, partial(_attention_run, stopwatch.device, tokens, mine))
            for side, mine in sides.items()
        ]
        measured = stopwatch.compare(contestants)
        for side, name in (("ours", f"ours {tokens}"), ("theirs", f"PyTorch {tokens}")):
            found["contestants"][name] = {"side": side, **measured[side].as_dict()}
        mine, other = measured["ours"], measured["theirs"]
        if mine.seconds and other.seconds:
            found["speed"][str(tokens)] = round(other.median / mine.median, 3)
    for tokens in counted_at:
        peaks = []
        for mine in (True, False):
            run = _attention_run(META, tokens, mine)
            with CudaRules(autocast=False):
                peaks.append(counted(run)["counted_bytes"])
        found["memory"][str(tokens)] = round(peaks[0] / peaks[1], 4)
    return found


def _lpips_run(work: Work, device: torch.device, mine: bool, channels_last: bool, autocast: bool) -> Callable:
    dtype = torch.float32 if autocast else torch.bfloat16
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = (work.images(device).float() / 127.5 - 1).to(torch.bfloat16, memory_format=layout)
    recon = (images * 0.9).requires_grad_()
    if mine:
        network = build_perceptual("random", None, dtype, device)
        return _forward_backward(lambda: network(recon, images), [recon])
    network = build_lpips(Ours(work, device, torch.float32), device, dtype)

    def theirs() -> torch.Tensor:
        if device.type == "meta":
            with CudaRules(autocast):
                return network(recon, images)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return network(recon, images)

    return _forward_backward(theirs, [recon])


def compare_lpips(stopwatch: Stopwatch, work: Work, counted_at: Work) -> dict[str, Any]:
    """Case 10: the package in bf16 in both layouts, and under autocast; bytes are counted at `counted_at`."""
    kinds = {  # name: ours, channels_last, autocast
        "ours bf16": (True, False, False),
        "ours bf16 channels_last": (True, True, False),
        "lpips autocast": (False, False, True),
        "lpips bf16": (False, False, False),
        "lpips bf16 channels_last": (False, True, False),
    }
    contestants = [
        Contestant(name, lambda kind=kind: _lpips_run(work, stopwatch.device, *kind))
        for name, kind in kinds.items()
    ]
    measured = stopwatch.compare(contestants)
    rows = {}
    for name, kind in kinds.items():
        side = "ours" if kind[0] else "theirs"
        rows[name] = {
            "side": side,
            **measured[name].as_dict(),
            **counted(_lpips_run(counted_at, META, *kind)),
        }
    found = {
        "image_size": work.image_size,
        "memory_counted_at": {"image_size": counted_at.image_size, "batch": counted_at.batch},
        "contestants": rows,
        "memory": {
            f"ours bf16 / {name}": round(rows["ours bf16"]["counted_bytes"] / rows[name]["counted_bytes"], 4)
            for name in ("lpips bf16", "lpips autocast")
        },
    }
    timed = {n: m.median for n, m in measured.items() if m.seconds}
    mine = min((n for n in timed if kinds[n][0]), key=timed.get, default=None)
    other = min((n for n in timed if not kinds[n][0]), key=timed.get, default=None)
    if mine and other:
        found |= {"speed": round(timed[other] / timed[mine], 3), "fastest": {"ours": mine, "theirs": other}}
    return found
