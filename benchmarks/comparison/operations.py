"""Cases 7 to 11: single operations and LPIPS, forward and backward, and decoding, compared with diffusers.

Shapes: B images, C channels, H x W pixels, N tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.comparison.measuring import Contestant, Stopwatch, counted, saved_bytes, speed_of_best
from benchmarks.comparison.ours import SEED, Ours, Work
from benchmarks.comparison.theirs import FASTEST_MODE, CudaRules, Theirs, Variant, build_lpips
from vae.losses.perceptual import build_perceptual
from vae.ops.attention import attention
from vae.ops.fused_conv import upsample_conv
from vae.ops.norm import group_norm_silu

META = torch.device("meta")
GROUPS, EPS = 32, 1e-6
NORM_SHAPES = ((128,), (128,))  # weight and bias
UPSAMPLE_SHAPES = ((256, 256, 3, 3), (256,))
ATTENTION_WIDTH = 512
OWN_NHWC_NORM = "PyTorch's own channels-last GroupNorm"
NHWC = "bf16 channels_last"
LAYOUTS = {"bf16": torch.contiguous_format, NHWC: torch.channels_last}


def _random(shape: tuple[int, ...], device: torch.device, scale: float = 1.0) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, device=device)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(SEED)) * scale).to(device)


def _forward_backward(operation: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], None]:
    """A function that runs `operation`, and its backward to `leaves` from a fixed gradient."""
    grad = None

    def run() -> None:
        nonlocal grad
        out = operation()
        if grad is None:
            grad = torch.ones_like(out)
        torch.autograd.grad(out, leaves, grad)

    return run


def _leaves(
    shapes: tuple[tuple[int, ...], ...],
    px: int,
    layout: torch.memory_format,
    device: torch.device,
    mine: bool,
) -> list[Tensor]:
    """A bf16 map (1, C, px, px) and the parameters of an operation, fp32 on our side, as in training."""
    dtype = torch.float32 if mine else torch.bfloat16
    parameters = [_random(shape, device, 0.02).to(dtype) for shape in shapes]
    parameters = [p.contiguous(memory_format=layout) if p.dim() == 4 else p for p in parameters]
    h = _random((1, shapes[-1][0], px, px), device).to(torch.bfloat16, memory_format=layout)
    return [tensor.requires_grad_() for tensor in (h, *parameters)]


def _norm_silu(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(h, GROUPS, weight, bias, EPS))


def _upsample_conv(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(F.interpolate(h, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)


def _compare(
    stopwatch: Stopwatch,
    shapes: tuple[tuple[int, ...], ...],
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    sides: tuple[int, int],
    compiled: bool = False,
) -> dict[str, Any]:
    """Compare both sides in both layouts, theirs also `compiled` in NHWC, and the fastest of each side.

    `sides` are those of the square map for timing, and for counting (there parameters are negligible).
    """
    px, counted_px = sides
    contestants, facts = [], {}
    for name, layout in LAYOUTS.items():
        for side, call in (("ours", ours), ("PyTorch", theirs)):

            def build(call=call, layout=layout, mine=side == "ours"):
                leaves = _leaves(shapes, px, layout, stopwatch.device, mine)
                return _forward_backward(lambda: call(*leaves), leaves)

            contestants.append(Contestant(f"{side} {name}", build))
            leaves = _leaves(shapes, counted_px, layout, META, side == "ours")
            saved = saved_bytes(partial(call, *leaves), leaves[1:])
            facts[f"{side} {name}"] = {"saved_bytes": saved}
    if compiled:
        name = f"PyTorch {NHWC} compile"
        build = partial(_compiled_run, theirs, shapes, px, stopwatch.device)
        contestants.append(Contestant(name, build, optional=True))
        facts[name] = {}
    leaves = _leaves(shapes, counted_px, torch.contiguous_format, META, False)
    with CudaRules(autocast=True):
        autocast_saved = saved_bytes(partial(theirs, *leaves), leaves[1:])
    measured = stopwatch.compare(contestants)
    rows = {name: {**facts[name], **m.as_dict()} for name, m in measured.items()}
    saved = rows["ours bf16 channels_last"]["saved_bytes"]
    return {
        "shape": [1, shapes[-1][0], px, px],
        "saved_at": [1, shapes[-1][0], counted_px, counted_px],
        "contestants": rows,
        "saved": {
            "ours / PyTorch bf16 channels_last": round(
                saved / rows["PyTorch bf16 channels_last"]["saved_bytes"], 4
            ),
            "ours / PyTorch under CUDA's bf16 autocast": round(saved / autocast_saved, 4),
        },
        "speed_like_for_like": {
            name: round(measured[f"PyTorch {name}"].median / measured[f"ours {name}"].median, 3)
            for name in LAYOUTS
            if measured[f"PyTorch {name}"].seconds and measured[f"ours {name}"].seconds
        },
        **speed_of_best(measured),
    }


def _compiled_run(
    operation: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], px: int, device: torch.device
) -> Callable[[], None]:
    leaves = _leaves(shapes, px, torch.channels_last, device, False)
    call = torch.compile(operation, dynamic=False, mode=FASTEST_MODE)
    return _forward_backward(lambda: call(*leaves), leaves)


def _our_norm_silu(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return group_norm_silu(h, weight, bias, GROUPS, EPS)


def has_nhwc_group_norm(device: torch.device) -> bool:
    """Whether PyTorch's GroupNorm keeps channels_last in both directions; otherwise it copies to NCHW."""
    h, weight, bias = _leaves(NORM_SHAPES, 8, torch.channels_last, device, False)
    out = F.group_norm(h, GROUPS, weight, bias, EPS)
    (grad,) = torch.autograd.grad(out, h, torch.ones_like(h))
    return all(t.is_contiguous(memory_format=torch.channels_last) for t in (out, grad))


def compare_norm_silu(stopwatch: Stopwatch, sides: tuple[int, int], compiled: bool) -> dict[str, Any]:
    """Case 7: GroupNorm with 32 groups, then SiLU."""
    found = _compare(stopwatch, NORM_SHAPES, _our_norm_silu, _norm_silu, sides, compiled)
    row = {"side": "theirs", "failure": f"not in PyTorch {torch.__version__}"}
    if has_nhwc_group_norm(stopwatch.device):
        row = found["contestants"][f"PyTorch {NHWC}"]
    found["contestants"][OWN_NHWC_NORM] = row
    return found


def norm_ways(px: int, device: torch.device, compiled: bool) -> dict[str, Callable[[], None]]:
    """GroupNorm and SiLU in NHWC, forward and backward: ours, PyTorch's, and PyTorch's compiled."""
    calls = {"ours": _our_norm_silu}
    calls[OWN_NHWC_NORM if has_nhwc_group_norm(device) else "PyTorch, which copies to NCHW"] = _norm_silu
    if compiled:
        calls["PyTorch, compiled"] = torch.compile(_norm_silu, dynamic=False)
    runs = {}
    for name, call in calls.items():
        leaves = _leaves(NORM_SHAPES, px, torch.channels_last, device, name == "ours")
        runs[name] = _forward_backward(partial(call, *leaves), leaves)
    return runs


def compare_upsample(stopwatch: Stopwatch, sides: tuple[int, int], compiled: bool) -> dict[str, Any]:
    """Case 8: upsamples a map of `sides` px by two, then a 3x3 convolution."""
    return _compare(stopwatch, UPSAMPLE_SHAPES, upsample_conv, _upsample_conv, sides, compiled)


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
        sides = {f"ours {tokens}": True, f"PyTorch {tokens}": False}
        contestants = [
            Contestant(name, partial(_attention_run, stopwatch.device, tokens, mine))
            for name, mine in sides.items()
        ]
        measured = stopwatch.compare(contestants)
        found["contestants"] |= {name: m.as_dict() for name, m in measured.items()}
        if speed := speed_of_best(measured):
            found["speed"][str(tokens)] = speed["speed"]
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
    rows = {
        name: {**measured[name].as_dict(), **counted(_lpips_run(counted_at, META, *kind))}
        for name, kind in kinds.items()
    }
    return {
        "image_size": work.image_size,
        "memory_counted_at": {"image_size": counted_at.image_size, "batch": counted_at.batch},
        "contestants": rows,
        "memory": {
            f"ours bf16 / {name}": round(rows["ours bf16"]["counted_bytes"] / rows[name]["counted_bytes"], 4)
            for name in ("lpips bf16", "lpips autocast")
        },
        **speed_of_best(measured),
    }


def _decoder_run(work: Work, device: torch.device, variant: Variant | None) -> Callable[[], Tensor]:
    """Decoding of the same latents: ours, or diffusers' in this variant, with bf16 weights."""
    latents = work.noise(device).to(torch.bfloat16)
    if variant is None:
        model = Ours(work, device).networks.autoencoder
        latents = latents.contiguous(memory_format=torch.channels_last)
        decode: Callable[[Tensor], Tensor] = model.decode
    else:
        side = Theirs(work, device, variant)
        latents = latents.contiguous(memory_format=side.layout)
        decode = partial(_their_decode, side)

    def run() -> Tensor:
        with torch.no_grad():
            return decode(latents)

    return run


def _their_decode(side: Theirs, latents: Tensor) -> Tensor:
    with side.precision():
        return side.vae.decode(latents).sample


def decoders(
    work: Work, device: torch.device, variants: list[Variant]
) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Builders of our decoding and of diffusers', by name."""
    builds = {"ours": partial(_decoder_run, work, device, None)}
    return builds | {f"diffusers {v.name}": partial(_decoder_run, work, device, v) for v in variants}


def compare_decoding(
    stopwatch: Stopwatch, work: Work, counted_at: Work, variants: list[Variant]
) -> dict[str, Any]:
    """Case 11: their fastest variants, eager and compiled; bytes are counted at `counted_at`."""
    optional = {f"diffusers {v.name}": v.compiled for v in variants}
    builds = decoders(work, stopwatch.device, variants)
    contestants = [Contestant(n, build, optional.get(n, False)) for n, build in builds.items()]
    measured = stopwatch.compare(contestants)
    on_meta = decoders(counted_at, META, [v for v in variants if not v.compiled])
    bytes_of = {name: counted(build()) for name, build in on_meta.items()}
    rows = {name: {**m.as_dict(), **bytes_of.get(name, {})} for name, m in measured.items()}
    mine = bytes_of.pop("ours")["counted_bytes"]
    return {
        "image_size": work.image_size,
        "memory_counted_at": {"image_size": counted_at.image_size, "batch": counted_at.batch},
        "contestants": rows,
        "memory": {f"ours / {n}": round(mine / facts["counted_bytes"], 4) for n, facts in bytes_of.items()},
        **speed_of_best(measured),
    }
