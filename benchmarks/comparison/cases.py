"""The ten cases: what they compare, their sizes, and their ratios.

Each case is a function of a Bench. It returns its contestants, with side, seconds and bytes of each, and the
ratios. Speed is their best median divided by our best; memory is ours divided by theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.comparison import operations
from benchmarks.comparison.measuring import Contestant, Stopwatch, counted, memory_limit, speed_of_best
from benchmarks.comparison.ours import Ours, Work
from benchmarks.comparison.theirs import (
    AUTOCAST,
    AUTOCAST_CHECKPOINTING,
    BF16,
    BF16_BEST_COMPILED,
    BF16_CHANNELS_LAST,
    BF16_CHANNELS_LAST_COMPILED,
    BF16_CHECKPOINTING,
    BF16_COMPILED,
    Theirs,
    Variant,
)
from vae.model.autoencoder import RECOMPUTE_LEVELS
from vae.system.host import GIB

META = torch.device("meta")
LIMIT_BYTES = 30 * GIB  # of case 4: available on a 32 GB card
ADAM_BYTES_PER_PARAMETER = 12  # fp32 weight and both moments

# Sides of the image in px (cases 1 to 6, 10, 11), of the feature map in px (7 and 8), tokens (9).
SMALL = {1: 96, 2: 256, 3: 64, 4: 128, 6: 64, 7: 256, 8: 64, 9: (1024, 4096), 10: 128, 11: 128}
LARGE = {1: 512, 2: 1024, 3: 2048, 4: 2048, 6: 1024}
LARGE |= {7: 1024, 8: 512, 9: (16384, 65536), 10: 1024, 11: 1024}


@dataclass(frozen=True)
class OursKind:
    """A configuration of our step: recompute level, compiled or not."""

    recompute: str
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"ours {self.recompute}{' compile' if self.compiled else ''}"


@dataclass(frozen=True)
class Bench:
    """The settings of all cases."""

    stopwatch: Stopwatch
    size: str  # "small" or "large"
    compile: bool  # whether compiled variants run

    @property
    def device(self) -> torch.device:
        return self.stopwatch.device

    def sizes(self, case: int) -> Any:
        return (SMALL if self.size == "small" else LARGE)[case]


def network_case(
    bench: Bench, work: Work, ours: list[OursKind], theirs: list[Variant], whole: bool
) -> dict[str, Any]:
    """Measure whole steps (`whole`) or only gradients, for all given configurations of both sides."""
    builds = {k.name: partial(Ours, work, recompute=k.recompute, compiled=k.compiled) for k in ours}
    builds |= {f"diffusers {v.name}": partial(Theirs, work, variant=v) for v in theirs}
    contestants: list[Contestant] = []
    facts: dict[str, dict[str, int]] = {}
    for kind, (name, build) in zip((*ours, *theirs), builds.items(), strict=True):
        contestants.append(Contestant(name, _runs(partial(build, device=bench.device), whole), kind.compiled))
    measured = bench.stopwatch.compare(contestants)
    for kind, (name, build) in zip((*ours, *theirs), builds.items(), strict=True):  # times are worth more
        facts[name] = {} if kind.compiled else counted(build(device=META).gradients)
    return {
        "image_size": work.image_size,
        "batch": work.batch,
        "contestants": {name: {**m.as_dict(), **facts[name]} for name, m in measured.items()},
        **speed_of_best(measured),
    }


def _runs(build: Callable[[], Ours | Theirs], whole: bool) -> Callable[[], Callable]:
    def run():
        side = build()
        return side.step if whole else lambda: (side.gradients(), side.clear())

    return run


def _memory(work: Work, pairs: list[tuple[str, Variant]]) -> dict[str, Any]:
    """Ratios of the counted peaks of one step of `work`, ours to theirs; and bytes per pixel."""
    ratios, per_pixel = {}, {}
    pixels = work.batch * work.image_size**2
    for level, variant in pairs:
        mine = counted(Ours(work, META, recompute=level).gradients)["counted_bytes"]
        other = counted(Theirs(work, META, variant).gradients)["counted_bytes"]
        ratios[f"ours {level} / diffusers {variant.name}"] = round(mine / other, 4)
        per_pixel[f"ours {level}"] = round(mine / pixels)
        per_pixel[f"diffusers {variant.name}"] = round(other / pixels)
    counted_at = {"image_size": work.image_size, "batch": work.batch}
    return {"memory": ratios, "memory_counted_at": counted_at, "counted_bytes_per_pixel": per_pixel}


def _plain(bench: Bench) -> list[Variant]:
    """Their variants without checkpointing."""
    compiled = [BF16_BEST_COMPILED, BF16_CHANNELS_LAST_COMPILED, BF16_COMPILED] if bench.compile else []
    return [AUTOCAST, BF16, BF16_CHANNELS_LAST, *compiled]


def _fast(bench: Bench) -> list[OursKind]:
    """Our fast configurations."""
    compiled = [OursKind("activations", compiled=True)] if bench.compile else []
    return [OursKind("none"), OursKind("activations"), *compiled]


def _without_compile(bench: Bench) -> Bench:
    """For cases whose compiled variants need minutes each and show the same as in case 2."""
    return replace(bench, compile=False)


def case_1(bench: Bench) -> dict[str, Any]:
    """VAE forward and backward, only L1"""
    bench = _without_compile(bench)
    large = Work(LARGE[1], 4, perceptual=False)
    work = large if bench.size == "large" else Work(SMALL[1], perceptual=False)
    found = network_case(bench, work, _fast(bench), _plain(bench), whole=False)
    return found | _memory(large, [("activations", BF16), ("activations", AUTOCAST)])


def case_2(bench: Bench) -> dict[str, Any]:
    """Whole step: L1, LPIPS, KL, clipping, AdamW"""
    work = Work(bench.sizes(2))
    found = network_case(bench, work, _fast(bench), _plain(bench), whole=True)
    return found | _memory(Work(LARGE[2]), [("activations", BF16), ("activations", AUTOCAST)])


def case_3(bench: Bench) -> dict[str, Any]:
    """Whole step of a large image"""
    bench = _without_compile(bench)
    found = network_case(bench, Work(bench.sizes(3)), _fast(bench), _plain(bench), whole=True)
    return found | _memory(Work(LARGE[3]), [("activations", BF16), ("activations", AUTOCAST)])


def case_4(bench: Bench) -> dict[str, Any]:
    """Whole step within 30 GiB, theirs with gradient checkpointing"""
    level = fastest_within(Work(LARGE[4]), LIMIT_BYTES)
    kinds = [OursKind(name) for name in dict.fromkeys((level, "blocks_encoder"))]
    theirs = [BF16_CHECKPOINTING, AUTOCAST_CHECKPOINTING]
    with memory_limit(bench.device, LIMIT_BYTES):
        found = network_case(bench, Work(bench.sizes(4)), kinds, theirs, whole=True)
    pairs = [("blocks_encoder", BF16_CHECKPOINTING), (level, BF16_CHECKPOINTING)]
    return found | _memory(Work(LARGE[4]), pairs)


def fastest_within(work: Work, limit_bytes: int) -> str:
    """The first level whose counted step, with weights and moments, needs at most `limit_bytes`."""
    for level in RECOMPUTE_LEVELS:
        side = Ours(work, META, recompute=level)
        parameters = sum(p.numel() for p in side.networks.autoencoder.parameters())
        if counted(side.gradients)["counted_bytes"] + parameters * ADAM_BYTES_PER_PARAMETER <= limit_bytes:
            return level
    raise ValueError(f"no recompute level fits in {limit_bytes / GIB:.1f} GiB at {work.image_size} px")


def case_6(bench: Bench) -> dict[str, Any]:
    """Adversarial step: both networks take one update"""
    bench = _without_compile(bench)
    work = Work(bench.sizes(6), adversarial=True)
    shared = replace(BF16, name="bf16, one forward for both (not in their script)", one_forward=True)
    found = network_case(bench, work, _fast(bench), [*_plain(bench), shared], whole=True)
    timed = [row for n, row in found["contestants"].items() if "one forward" not in n and "seconds" in row]
    ours, theirs = ([r["seconds"] for r in timed if r["side"] == side] for side in ("ours", "theirs"))
    if ours and theirs:
        found["speed_against_the_script_as_written"] = round(min(theirs) / min(ours), 3)
    large = replace(work, image_size=LARGE[6])
    return found | _memory(large, [("activations", BF16), ("activations", AUTOCAST)])


def case_7(bench: Bench) -> dict[str, Any]:
    """GroupNorm and SiLU, forward and backward, 128 channels"""
    return operations.compare_norm_silu(bench.stopwatch, (bench.sizes(7), LARGE[7]), bench.compile)


def case_8(bench: Bench) -> dict[str, Any]:
    """Nearest-neighbor upsampling by two and 3x3 convolution, forward and backward, 256 channels"""
    return operations.compare_upsample(bench.stopwatch, (bench.sizes(8), LARGE[8]), bench.compile)


def case_9(bench: Bench) -> dict[str, Any]:
    """Attention with one head of width 512, forward and backward"""
    return operations.compare_attention(bench.stopwatch, bench.sizes(9), LARGE[9])


def case_10(bench: Bench) -> dict[str, Any]:
    """LPIPS, forward and backward to the reconstruction"""
    return operations.compare_lpips(bench.stopwatch, Work(bench.sizes(10)), Work(LARGE[10]))


def case_11(bench: Bench) -> dict[str, Any]:
    """Decoding of one image"""
    works = (Work(px, perceptual=False) for px in (bench.sizes(11), LARGE[11]))
    variants = [BF16, BF16_CHANNELS_LAST, *[BF16_BEST_COMPILED] * bench.compile]
    return operations.compare_decoding(bench.stopwatch, *works, variants)


ALL = (case_1, case_2, case_3, case_4, case_6, case_7, case_8, case_9, case_10, case_11)
CASES = {int(case.__name__.removeprefix("case_")): case for case in ALL}
