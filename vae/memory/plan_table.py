"""The table of --plan: memory, passes and minimum time of every profile's step on a card.

Counted by the planner behind --micro_batch_size auto. A card that is not in this machine is planned for from
its specifications.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vae.config.options import Config, SpeedConfig
from vae.config.precision import PrecisionSupport, choose_dtype
from vae.config.recipes import RECIPES, recipe_values
from vae.config.resolve import resolve
from vae.device import precision_support
from vae.memory.available import CPU_SHARE, available_bytes
from vae.memory.plan import StepMemory, StepSpec, choose_step, fastest_level, reserve_bytes, stage_spec
from vae.system import console
from vae.system.errors import UserError
from vae.system.gpus import CPU_SETTINGS, Card, find_cards, match_card
from vae.system.host import GIB

# Of an RTX 5090's 31.84 GiB, PyTorch sees 31.37. CUDA itself uses 0.6 of these if a process uses the rest:
# https://github.com/Wan-Video/Wan2.1/issues/465. The free memory of a card in this machine is read instead.
DRIVER_AND_CONTEXT_GIB = 1.1
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Target:
    """The target of a plan: a card in this machine, another card, or main memory."""

    name: str
    card: Card | None
    is_gpu: bool
    precision: PrecisionSupport
    available: int  # bytes, before --vram_margin
    explained: str  # the derivation of `available`
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The options that the card, or its absence, sets."""
        return self.card.settings if self.card else ({} if self.is_gpu else CPU_SETTINGS)


@dataclass(frozen=True)
class ProfilePlan:
    """The plan of one profile's step on a target; if it does not fit, the settings that need least memory."""

    profile: str  # or another name of what is planned
    image_size: int  # px
    images_per_step: int  # batch size x accumulation steps
    available_gib: float
    precision: str | None = None
    micro_batch: int | None = None
    passes: int | None = None
    recompute: str | None = None  # recompute level
    peak_gib: float | None = None  # StepMemory.predicted
    tflop_per_image: float | None = None  # 1e12 operations, forward and backward, recomputation included
    floor_seconds: float | None = None  # least time of a step; None: the card's rate is not known
    problem: str | None = None  # why it cannot run
    note: str | None = None  # the text of `features_note`


def find_target(gpu: str | None, vram_gib: float | None) -> Target:
    """The card named `gpu`, or any card of `vram_gib`, or the card in this machine, or else its main memory.

    Both together are the card `gpu` with `vram_gib` of memory. Raises UserError for an unknown card or too
    little memory.
    """
    card = find_cards(gpu)[0] if gpu is not None else None
    total = card.vram_gib if card is not None and vram_gib is None else vram_gib
    if total is None:
        return _target_here()
    if not DRIVER_AND_CONTEXT_GIB < total < math.inf:
        raise UserError(f"--vram_gib {total:g}: set the memory of the whole card, for example 12")
    name = card.name if card else f"a GPU of {total:g} GiB"
    precision = PrecisionSupport(name, True, "native" if card is None or card.has_bf16 else "none")
    available = int((total - DRIVER_AND_CONTEXT_GIB) * GIB)
    explained = f"{total:.1f} GiB minus {DRIVER_AND_CONTEXT_GIB} for the driver and CUDA"
    return Target(name, card, True, precision, available, explained)


def _target_here() -> Target:
    if not torch.cuda.is_available():
        device = torch.device("cpu")
        name = "this machine's CPU"
        explained = f"{CPU_SHARE:.0%} of the free main memory"
        notes = ('no GPU found: --gpu "RTX 5090" or --vram_gib 12 plans for a card in another machine',)
        return Target(name, None, False, precision_support(device), available_bytes(device), explained, notes)
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    total = facts.total_memory / GIB
    card = match_card(facts.name, total)
    explained = f"free now of {total:.1f} GiB"
    return Target(facts.name, card, True, precision_support(device), available_bytes(device), explained)


def plan_profiles(target: Target) -> Iterator[ProfilePlan]:
    """The plan of every profile, each as soon as it is counted (seconds per profile)."""
    for name in RECIPES:
        config = resolve({}, None, recipe_values(name, target.is_gpu), target.settings)
        yield plan_profile(name, config, target)


def plan_profile(name: str, config: Config, target: Target) -> ProfilePlan:
    """Plan the step of `config`, called `name`, on `target`."""
    image_size, batch_size = config.data.image_size, config.run.batch_size
    available = int(target.available * config.speed.vram_margin)
    images = batch_size * config.run.accumulation_steps
    try:
        dtype = choose_dtype(config.speed, target.precision)
    except UserError as error:
        return ProfilePlan(name, image_size, images, available / GIB, problem=str(error))
    reserve = reserve_bytes(config, is_gpu=target.is_gpu)
    spec = stage_spec(config, image_size, batch_size, getattr(torch, dtype), reserve)
    memory, problem = _choose(spec, available, config.speed)
    floor = None
    if target.card is not None and dtype != "float32":  # the rates are for bf16
        floor = floor_seconds(memory, images, target.card)
    return ProfilePlan(
        profile=name,
        image_size=image_size,
        images_per_step=images,
        available_gib=available / GIB,
        precision=dtype,
        micro_batch=memory.micro_batch,
        passes=count_passes(memory, images),
        recompute=memory.recompute,
        peak_gib=memory.predicted(available) / GIB,
        tflop_per_image=memory.flops / TERA,
        floor_seconds=floor,
        problem=problem,
        note=features_note(memory, images),
    )


def count_passes(memory: StepMemory, images: int) -> int:
    """Number of passes in a step of `images`; the last pass may be smaller than the others."""
    return -(-images // memory.micro_batch)


def floor_seconds(memory: StepMemory, images: int, card: Card) -> float | None:
    """Lower bound of the time of a step of `images`, in seconds; None if the card's rates are not recorded.

    It is the larger of two bounds: the arithmetic at the card's dense bf16 rate, and the time, at the card's
    bandwidth, to write and read once the peak memory of each pass.
    """
    if card.bf16_tflops is None or card.bandwidth_gb_s is None:
        return None
    arithmetic = memory.flops * images / (card.bf16_tflops * TERA)
    traffic = 2 * memory.working * count_passes(memory, images) / (card.bandwidth_gb_s * GIGA)
    return max(arithmetic, traffic)


def _choose(spec: StepSpec, available: int, speed: SpeedConfig) -> tuple[StepMemory, str | None]:
    """The trainer's own choice; or, if nothing fits, the step with the least memory and a message."""
    try:
        memory = choose_step(spec, available, speed.micro_batch_size, speed.recompute)
    except UserError:
        memory = fastest_level(spec, available, 1, speed.recompute)
    if memory.total <= available:
        return memory, None
    images = "one image needs" if memory.micro_batch == 1 else f"{memory.micro_batch} images per pass need"
    return memory, f"does not fit: {images} {memory.total / GIB:.1f} GiB"


def plan_data(gpu: str | None = None, vram_gib: float | None = None) -> dict[str, Any]:
    """The whole plan as plain data for JSON."""
    target = find_target(gpu, vram_gib)
    facts = asdict(target)
    facts["available_gib"] = facts.pop("available") / GIB
    return {"target": facts, "profiles": [asdict(plan) for plan in plan_profiles(target)]}


def describe_step(memory: StepMemory, images: int) -> str:
    """Passes and level of a step: "8 x 2, recompute none" is 8 passes of 2; the last may be smaller."""
    return f"{count_passes(memory, images)} x {memory.micro_batch}, recompute {memory.recompute}"


def features_note(memory: StepMemory, images: int) -> str | None:
    """A line of the plan if MAX_FEATURES is exceeded, or if fewer passes would exceed it."""
    passes, limit = count_passes(memory, images), memory.max_micro_batch
    reason = (
        "the features of a convolution have 2^31 elements or more, for which cuDNN has few and slow plans"
    )
    if memory.micro_batch > limit:
        remedy = (
            f"--micro_batch_size {limit} avoids this" if limit else "only a smaller --image_size avoids this"
        )
        return f"WARNING: with {memory.micro_batch} per pass, {reason}: {remedy}"
    if passes > 1 and -(-images // (passes - 1)) > limit:
        return f"note: with more than {limit} per pass, {reason}"
    return None


TABLE_ROW = "{:<13}{:>5}{:>8}{:>9}  {:<15}{:>8}{:>8}{:>13}{:>14}"
COLUMNS = "px", "images", "passes", "recompute", "peak GiB", "of GiB", "TFLOP/image", "floor s/step"
LEGEND = """
images: per optimizer step; passes: number x images of each pass; all columns: docs/memory.md
peak: everything on the card or in main memory, counted by running the step without data, not measured
floor: the arithmetic at the card's dense bf16 rate or the traffic at its bandwidth, whichever takes longer"""


def table_row(plan: ProfilePlan) -> str:
    """One row of the table, under COLUMNS."""
    if plan.problem:
        start = f"{plan.profile:<13}{plan.image_size:>5}{plan.images_per_step:>8}"
        return f"{start}{'-':>9}  {plan.recompute or '-':<15} {plan.problem}"
    return TABLE_ROW.format(
        plan.profile,
        plan.image_size,
        plan.images_per_step,
        f"{plan.passes} x {plan.micro_batch}",
        plan.recompute,
        f"{plan.peak_gib:.2f}",
        f"{plan.available_gib:.1f}",
        f"{plan.tflop_per_image:.1f}",
        "-" if plan.floor_seconds is None else f"{plan.floor_seconds:.2f}",
    )


def print_plan(gpu: str | None = None, vram_gib: float | None = None) -> None:
    """Print the table of all profiles; raises UserError as find_target does."""
    target = find_target(gpu, vram_gib)
    print_table(target, plan_profiles(target))


def print_table(target: Target, plans: Iterable[ProfilePlan], first_column: str = "profile") -> None:
    """Print the plans for a target, each as soon as it is counted."""
    console.info(f"Plan for {target.name}: {target.available / GIB:.1f} GiB ({target.explained})")
    for note in target.notes:
        console.info(f"note: {note}")
    console.info("\n" + TABLE_ROW.format(first_column, *COLUMNS))
    for plan in plans:
        console.info(table_row(plan))
        if plan.note and not plan.problem:
            console.info(f"  {plan.note}")
    console.info(LEGEND)
