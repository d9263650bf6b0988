"""What fits on a card: every profile with the memory, the passes and the least time its step will take.

Counted by the planner behind --micro_batch_size auto; a card that is not here is planned for by its facts.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from vae.config.errors import UserError
from vae.config.options import Config
from vae.config.recipes import RECIPES, recipe_values
from vae.config.resolve import precision, resolve
from vae.device import has_bf16
from vae.gpus import CPU_SETTINGS, Card, lookup_card, match_card
from vae.host import GIB
from vae.memory.available import CPU_SHARE, CUDA_RESERVE, available_bytes
from vae.memory.plan import StepMemory, StepSpec, choose_step, fastest_rung
from vae.memory.stage_spec import stage_spec

# Of an RTX 5090's 31.84 GiB PyTorch sees 31.37, and of those 0.6 are CUDA's own where a process runs out of
# the rest: https://github.com/Wan-Video/Wan2.1/issues/465. A card that is here is asked instead.
DRIVER_AND_CONTEXT_GIB = 1.1
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Target:
    """What is planned for: a card that is here, one that is not, or main memory."""

    name: str
    card: Card | None
    is_gpu: bool
    has_bf16: bool
    available: int  # bytes, before --vram_margin
    explained: str  # what `available` is
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProfilePlan:
    """How one profile's step runs on a target; one that does not fit has the smallest need of all ways."""

    profile: str
    image_size: int  # px
    images_per_step: int  # batch size x accumulation steps
    precision: str | None
    micro_batch: int | None
    passes: int | None
    recompute: str | None  # rung of the ladder
    peak_gib: float | None  # StepMemory.total
    available_gib: float
    tflop_per_image: float | None  # 1e12 operations, forward and backward, recomputation included
    floor_seconds: float | None  # of one step; None: the card's rate is not known
    problem: str | None  # why it cannot run


def find_target(gpu: str | None, vram_gib: float | None) -> Target:
    """The card named by `gpu`, or any of `vram_gib`, or the one here, or else this machine's main memory.

    Both together are the card `gpu` with other memory than it is sold with. Raises UserError for an unknown
    card or too little memory.
    """
    if gpu is None and vram_gib is None:
        return _target_here()
    card = lookup_card(gpu) if gpu is not None else None
    total = vram_gib if vram_gib is not None else card.vram_gib
    if not (math.isfinite(total) and total > DRIVER_AND_CONTEXT_GIB):
        raise UserError(
            f"--vram_gib {total:g} leaves nothing to plan with, for the driver and CUDA take "
            f"{DRIVER_AND_CONTEXT_GIB} GiB: give the memory of the whole card, such as 12"
        )
    return Target(
        name=card.name if card else f"a GPU of {total:g} GiB",
        card=card,
        is_gpu=True,
        has_bf16=True,
        available=int((total - DRIVER_AND_CONTEXT_GIB) * GIB),
        explained=f"{total:.1f} GiB less {DRIVER_AND_CONTEXT_GIB} for the driver and CUDA",
        notes=() if card else ("its rate is not known without --gpu, so there is no floor of time",),
    )


def _target_here() -> Target:
    if not torch.cuda.is_available():
        return Target(
            name="this machine's CPU",
            card=None,
            is_gpu=False,
            has_bf16=True,
            available=available_bytes(torch.device("cpu")),
            explained=f"{CPU_SHARE:.0%} of the free main memory",
            notes=('no GPU found: --gpu "RTX 5090" or --vram_gib 12 plans for one that is not here',),
        )
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    card = match_card(facts.name, facts.total_memory / GIB)
    notes = []
    if card is None:
        notes.append("no profile for this card: settings come from its memory, and its rate is not known")
    others = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())} - {facts.name}
    if others:
        notes.append(f"planned for card {device.index}; there are others: {', '.join(sorted(others))}")
    return Target(
        name=facts.name,
        card=card,
        is_gpu=True,
        has_bf16=has_bf16(device),
        available=available_bytes(device),
        explained=f"free now of {facts.total_memory / GIB:.1f} GiB",
        notes=tuple(notes),
    )


def plan_profiles(target: Target) -> Iterator[ProfilePlan]:
    """The plan of every profile, one after the other as they are counted (seconds each)."""
    settings = target.card.settings if target.card else ({} if target.is_gpu else CPU_SETTINGS)
    for name in RECIPES:
        config = resolve({}, None, recipe_values(name, target.is_gpu), settings)
        yield plan_profile(name, config, target)


def plan_profile(name: str, config: Config, target: Target) -> ProfilePlan:
    """How the step of `config`, called `name`, runs on `target`."""
    available = int(target.available * config.speed.vram_margin)
    images = config.run.batch_size * config.run.accumulation_steps
    about = {
        "profile": name,
        "image_size": config.data.image_size,
        "images_per_step": images,
        "available_gib": available / GIB,
    }
    try:
        dtype = precision(config.speed, target.has_bf16, target.name)
    except UserError as error:
        unknown = {item.name: None for item in fields(ProfilePlan) if item.name not in about}
        return ProfilePlan(**(about | unknown | {"problem": str(error)}))
    spec = stage_spec(
        config,
        config.data.image_size,
        config.run.batch_size,
        getattr(torch, dtype),
        CUDA_RESERVE if target.is_gpu else 0,
    )
    memory, problem = _choose(spec, available)
    known_rate = target.card is not None and dtype != "float32"
    return ProfilePlan(
        **about,
        precision=dtype,
        micro_batch=memory.micro_batch,
        passes=passes_of(memory, images),
        recompute=memory.recompute,
        peak_gib=memory.total / GIB,
        tflop_per_image=memory.flops / TERA,
        floor_seconds=floor_seconds(memory, images, target.card) if known_rate else None,
        problem=problem,
    )


def passes_of(memory: StepMemory, images: int) -> int:
    """Passes that a step of `images` takes; the last may be smaller than the others."""
    return -(-images // memory.micro_batch)


def floor_seconds(memory: StepMemory, images: int, card: Card) -> float:
    """Least seconds of a step of `images`, which no real one reaches: the larger of two bounds.

    Its arithmetic at the card's dense bf16 rate, and writing and reading once, at its bandwidth, what each
    pass holds at its peak.
    """
    arithmetic = memory.flops * images / (card.bf16_tflops * TERA)
    traffic = 2 * memory.working * passes_of(memory, images) / (card.bandwidth_gb_s * GIGA)
    return max(arithmetic, traffic)


def _choose(spec: StepSpec, available: int) -> tuple[StepMemory, str | None]:
    """The trainer's own choice, or the smallest need there is and that it does not fit."""
    try:
        return choose_step(spec, available, "auto", "auto"), None
    except UserError:
        least = fastest_rung(spec, available, 1, "auto")
        return least, f"does not fit: one image needs {least.total / GIB:.1f} GiB"


def plan_data(gpu: str | None = None, vram_gib: float | None = None) -> dict[str, Any]:
    """The whole plan as plain data for JSON."""
    target = find_target(gpu, vram_gib)
    facts = asdict(target)
    facts["available_gib"] = facts.pop("available") / GIB
    return {"target": facts, "profiles": [asdict(plan) for plan in plan_profiles(target)]}


def way_of(memory: StepMemory, images: int) -> str:
    """How a step runs: "8 x 2, recompute none" are 8 passes of 2, the last of which may be smaller."""
    return f"{passes_of(memory, images)} x {memory.micro_batch}, recompute {memory.recompute}"


HEAD = (
    f"{'profile':<10}{'px':>5}{'images':>8}{'passes':>9}  {'recompute':<15}{'peak GiB':>8}{'of GiB':>8}"
    f"{'TFLOP/image':>13}{'floor s/step':>14}"
)


def table_line(plan: ProfilePlan) -> str:
    """One line of the table under HEAD."""
    head = f"{plan.profile:<10}{plan.image_size:>5}{plan.images_per_step:>8}"
    if plan.problem:
        return f"{head}   {plan.problem}"
    passes = f"{plan.passes} x {plan.micro_batch}"
    floor = f"{plan.floor_seconds:.2f}" if plan.floor_seconds is not None else "-"
    return (
        f"{head}{passes:>9}  {plan.recompute:<15}{plan.peak_gib:>8.2f}{plan.available_gib:>8.1f}"
        f"{plan.tflop_per_image:>13.1f}{floor:>14}"
    )


def _legend(target: Target) -> list[str]:
    libraries = f", and {CUDA_RESERVE / GIB:g} GiB for libraries and gaps" if target.is_gpu else ""
    lines = [
        "images: of one optimizer step, in so many passes of so many; every column: docs/plan.md",
        "peak: weights, gradients, moments, averaged weights, all tensors of the step without torch.compile"
        f"{libraries}; counted by running the step without data, not measured",
    ]
    if target.card:
        lines.append(
            f"floor: the arithmetic at {target.card.bf16_tflops:g} TFLOP/s (dense bf16) or the traffic at "
            f"{target.card.bandwidth_gb_s:g} GB/s, whichever is longer; no real step is as fast"
        )
    return lines


def print_plan(gpu: str | None = None, vram_gib: float | None = None) -> None:
    """Print the table, each profile as soon as it is counted; UserError as find_target raises."""
    target = find_target(gpu, vram_gib)
    print(f"Plan for {target.name}: {target.available / GIB:.1f} GiB ({target.explained})")
    for note in target.notes:
        print(f"note: {note}")
    print(f"\n{HEAD}", flush=True)
    for plan in plan_profiles(target):
        print(table_line(plan), flush=True)
    print("", *_legend(target), sep="\n")
