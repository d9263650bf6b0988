"""The plan table shows what the trainer would choose, also for cards in other machines."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vae.config.options import RECOMPUTE, build
from vae.config.precision import PrecisionSupport
from vae.config.recipes import RECIPES, recipe_values
from vae.config.resolve import resolve
from vae.memory import plan_table
from vae.memory.available import CPU_SHARE
from vae.memory.plan import StepMemory, choose_step, reserve_bytes, stage_spec, step_memory
from vae.memory.plan_table import (
    DRIVER_AND_CONTEXT_GIB,
    ProfilePlan,
    Target,
    find_target,
    floor_seconds,
    plan_data,
    plan_profile,
    print_plan,
    table_row,
)
from vae.system.errors import UserError
from vae.system.gpus import CARDS, find_cards
from vae.system.host import GIB

MODEL = {"channels": [8, 16], "layers_per_block": 1, "norm_groups": 4, "z_channels": 4}
STEP = {"image_size": 64, "batch_size": 3, "accumulation_steps": 2, "perceptual_weight": 0.0}
TINY = build({**MODEL, **STEP, "use_bf16": True, "vram_margin": 0.5})
SPEC = stage_spec(TINY, 64, 3, torch.bfloat16, reserve_bytes(TINY, is_gpu=True))
RTX_5090 = find_cards("RTX 5090")[0]


def target(available: int, card=RTX_5090, has_bf16: bool = True) -> Target:
    support = PrecisionSupport("a card", is_gpu=True, bf16="native" if has_bf16 else "none")
    return Target("a card", card, is_gpu=True, precision=support, available=available, explained="")


# --- the target -----------------------------------------------------------------------------------------


def test_card_in_another_machine():
    for card in CARDS:
        found = find_target(card.name, None)
        assert found.card == card
        assert found.is_gpu
        assert (found.precision.bf16 == "native") == card.has_bf16
        assert found.available == int((card.vram_gib - DRIVER_AND_CONTEXT_GIB) * GIB)
    assert find_target("RTX 4090", 48).available > 40 * GIB


@pytest.mark.parametrize("vram_gib", [1, float("nan"), float("inf")])
def test_impossible_memory_is_an_error(vram_gib):
    with pytest.raises(UserError, match=rf"--vram_gib {vram_gib:g}.* for example 12") as caught:
        find_target(None, vram_gib)
    assert "\n" not in str(caught.value)


def test_without_gpu_main_memory_is_planned_and_the_flags_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("vae.memory.available.free_memory", lambda: 16 * GIB)
    found = find_target(None, None)
    assert not found.is_gpu
    assert found.available == 16 * GIB * CPU_SHARE
    assert any("--gpu" in note and "--vram_gib" in note for note in found.notes)


def cards_here(monkeypatch, card: tuple[str, float, tuple[int, int]], free_gib: float) -> None:
    """Make PyTorch report a card of (name, GiB, capability): a real one cannot exist here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    name, gib, (major, minor) = card
    facts = SimpleNamespace(name=name, total_memory=int(gib * GIB), major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB), int(gib * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


def test_card_in_this_machine_with_its_free_memory(monkeypatch):
    cards_here(monkeypatch, ("NVIDIA GeForce RTX 5090", 31.36, (12, 0)), free_gib=20)
    found = find_target(None, None)
    assert found.card == RTX_5090
    assert found.available == 20 * GIB
    assert found.notes == ()


def test_card_without_bf16(monkeypatch):
    cards_here(monkeypatch, ("Tesla T4", 14.6, (7, 5)), free_gib=14)
    found = find_target(None, None)
    assert found.precision.bf16 == "none"
    plan = plan_profile("mine", TINY, found)
    assert "Tesla T4 has no bf16" in plan.problem
    assert "Tesla T4 has no bf16" in table_row(plan)
    fp16 = replace(TINY, speed=replace(TINY.speed, use_bf16=False, mixed_precision=True))
    assert plan_profile("mine", fp16, found).precision == "float16"


# --- a profile on a target ------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_is_planned_as_the_trainer_plans_it():
    needs = {step_memory(replace(SPEC, recompute=r), n).total for r in RECOMPUTE for n in (1, 2, 6)}
    fitting = 0
    for need in sorted(needs):
        plan = plan_profile("mine", TINY, target(2 * need))  # --vram_margin 0.5
        chosen = choose_step(SPEC, need, "auto", "auto")
        assert plan.problem is None
        assert (plan.micro_batch, plan.recompute) == (chosen.micro_batch, chosen.recompute)
        assert plan.peak_gib * GIB == chosen.predicted(need) <= need
        assert chosen.total <= need
        assert plan.images_per_step == 6
        assert plan.passes == -(-6 // plan.micro_batch)
        fitting += plan.micro_batch == 6
    assert 0 < fitting < len(needs)


@pytest.mark.slow
def test_profile_that_does_not_fit_shows_the_least_memory():
    least = min(step_memory(replace(SPEC, recompute=level), 1).total for level in RECOMPUTE)
    plan = plan_profile("mine", TINY, target(2 * least - 2))
    assert plan.problem == f"does not fit: one image needs {least / GIB:.1f} GiB"
    assert plan.peak_gib * GIB == least
    assert plan.problem in table_row(plan)
    assert plan_profile("mine", TINY, target(2 * least)).problem is None


def test_floor_is_the_longer_of_arithmetic_and_traffic():
    card = replace(RTX_5090, bf16_tflops=100, bandwidth_gb_s=1000)
    memory = StepMemory("none", 3, resident=0, working=10**9, reserve=0, flops=50e12)
    assert floor_seconds(memory, 8, card) == pytest.approx(8 * 0.5)
    memory = replace(memory, flops=0.001e12)
    assert floor_seconds(memory, 8, card) == pytest.approx(3 * 2 * 0.001)  # 3 passes, written and read


# --- the whole table ------------------------------------------------------------------------------------


@pytest.fixture
def only_the_demo(monkeypatch):
    """One small profile, which is fast, on a machine without a card."""
    monkeypatch.setattr(plan_table, "RECIPES", {"demo": RECIPES["demo"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_json_contains_what_the_table_shows(only_the_demo, capsys):
    data = json.loads(json.dumps(plan_data()))
    (plan,) = data["profiles"]
    assert plan["profile"] == "demo"
    assert data["target"]["available_gib"] * 0.98 == pytest.approx(plan["available_gib"])
    print_plan()
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("demo")]
    assert f"{plan['peak_gib']:.2f}" in row.split()
    assert any(line.startswith("note:") and "--gpu" in line for line in lines)
    assert max(map(len, lines)) < 200


def of_one_image(profile: str, found: Target) -> ProfilePlan:
    """The plan with passes of one image. They decide the level; "auto" then searches the largest that fit."""
    config = resolve({"micro_batch_size": "1"}, None, recipe_values(profile, has_gpu=True), {})
    return plan_profile(profile, config, found)


@pytest.mark.slow
def test_every_profile_fits_an_rtx_5090():
    for profile in RECIPES:
        plan = of_one_image(profile, find_target("RTX 5090", None))
        assert plan.problem is None
        assert plan.peak_gib <= plan.available_gib < RTX_5090.vram_gib
        assert plan.floor_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "smallest_gib"),
    [("card-8gb", 7.5), ("card-12gb", 11.5), ("card-16gb", 15), ("card-24gb", 22), ("decoder", 7.5)],
)
def test_profile_of_a_card_size_fits_every_card_of_this_size_without_more_arithmetic(profile, smallest_gib):
    """Cards of one size differ: an A10 with "24 GB" has 22.5 GiB. "activations" recomputes no convolution."""
    sizes = [card.vram_gib for card in CARDS if smallest_gib <= card.vram_gib]
    plan = of_one_image(profile, find_target(None, min(sizes)))
    assert plan.problem is None
    assert plan.recompute in ("none", "activations")
    assert plan.peak_gib < plan.available_gib
