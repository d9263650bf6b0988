"""Cards are matched by name and memory, and the allocator gets its settings."""

import os
import platform
import subprocess
import sys
from dataclasses import fields

import pytest

from tests.harness.runs import ROOT
from vae.config.options import SpeedConfig, all_options
from vae.system.errors import UserError
from vae.system.gpus import (
    ALLOCATOR_VARIABLES,
    CARDS,
    CPU_SETTINGS,
    FREED_BLOCKS,
    GROWING_SEGMENTS,
    allocator_setting,
    find_cards,
    match_card,
    set_gpu_memory_variables,
)

# Device name and MiB as NVML reports them, and the expected card, or None if it is unknown.
REPORTED = [
    ("NVIDIA GeForce RTX 5090", 32607, "RTX 5090"),
    ("NVIDIA GeForce RTX 5090 D", 32607, "RTX 5090 D"),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 24463, "RTX 5090 Laptop GPU"),
    ("NVIDIA GeForce RTX 5080 SUPER", 24463, None),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "RTX 5060 Ti 16GB"),
    ("NVIDIA GeForce RTX 5060 Ti", 8151, "RTX 5060 Ti 8GB"),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"),
    ("NVIDIA GeForce RTX 4090", 49140, None),  # modified, with twice the memory
    ("NVIDIA H100 80GB HBM3", 81559, "H100"),
    ("NVIDIA H100 PCIe", 81559, "H100 PCIe"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, None),
    ("NVIDIA A100-SXM4-80GB", 81920, "A100-SXM4-80GB"),
    ("NVIDIA RTX A6000", 49140, "RTX A6000"),
    ("NVIDIA RTX A6000", 46068, "RTX A6000"),  # with ECC
    ("NVIDIA RTX PRO 5000 Blackwell", 73000, None),  # a version with 72 GB
    ("NVIDIA GeForce RTX 3090", 24268, "RTX 3090"),
    ("Tesla T4", 15360, "Tesla T4"),
    ("NVIDIA GeForce GTX 1080 Ti", 11264, None),
    ("", 32607, None),
]


def test_match_card_by_reported_name_and_memory():
    for name, mib, expected in REPORTED:
        found = match_card(name, mib / 1024)
        assert (found.name if found else None) == expected, (name, mib)


# GiB of cards as PyTorch reports them, from its out-of-memory messages


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("rtx5090", "RTX 5090"),
        ("5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("rtx 5060 ti 16 gb", "RTX 5060 Ti 16GB"),
        ("RTX 5060 Ti", "RTX 5060 Ti 16GB"),
        ("RTX 3060 Laptop", "RTX 3060 Laptop GPU"),
        ("V100 32 GB", "Tesla V100-SXM2-32GB"),
        ("H100 80GB", "H100"),
    ],
)
def test_find_cards_accepts_spellings(typed, name):
    assert find_cards(typed)[0].name == name


def test_name_that_several_cards_share_finds_all_of_them():
    assert [card.vram_gib for card in find_cards("RTX 3060")] == [12, 8]
    assert {card.vram_gib for card in find_cards("A100")} == {40, 80}
    assert [card.name for card in find_cards("RTX 4060 Ti")] == ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]


@pytest.mark.parametrize(
    ("typed", "suggested", "vram_gib"),
    [("RTX 5095", "RTX 5090", "12"), ("banana", None, "12"), ("", None, "12"), ("24GB", None, "24")],
)
def test_unknown_card_names_similar_ones_and_the_flag_for_the_memory(typed, suggested, vram_gib):
    with pytest.raises(UserError) as caught:
        find_cards(typed)
    message = str(caught.value)
    assert repr(typed) in message
    assert f"--vram_gib {vram_gib})" in message
    assert "vae/system/gpus.py" in message
    assert "\n" not in message
    assert ("did you mean" in message) == (suggested is not None)
    assert (suggested or "") in message


def test_every_card_has_plausible_facts_and_rates_have_a_source():
    for card in CARDS:
        assert (7, 0) <= card.compute_capability <= (12, 0)
        assert 4 <= card.vram_gib <= 512
        assert card.has_bf16 == (card.compute_capability >= (8, 0))
        assert (card.bf16_tflops is None) == (card.bandwidth_gb_s is None) == (card.source == "")
        if card.bf16_tflops is None or card.bandwidth_gb_s is None:
            continue
        assert card.source.startswith("https://"), card.name
        # FLOP per byte: the range of such cards; a typing error in a digit is outside it
        assert 80 <= card.bf16_tflops * 1000 / card.bandwidth_gb_s <= 400, card.name
    names = [card.name for card in CARDS]
    assert len(set(names)) == len(names)


def test_cards_that_share_a_name_are_told_apart_by_their_memory():
    for card in CARDS:
        assert find_cards(card.name)[0] == card
        for factor in (0.94, 1):  # ECC or PyTorch report less
            assert match_card(f"NVIDIA {card.device_name}", card.vram_gib * factor) == card


def test_card_settings_affect_speed_only():
    speed = {item.name for item in fields(SpeedConfig)}
    speed |= {"num_workers", "prefetch_factor", "persistent_workers"}
    for settings in (CPU_SETTINGS, *(card.settings for card in CARDS)):
        assert settings.keys() <= speed & all_options().keys()


@pytest.mark.parametrize(
    ("system", "release", "expected"),
    [
        ("Linux", "6.8.0-49-generic", GROWING_SEGMENTS),
        ("Linux", "5.15.153.1-microsoft-standard-WSL2", FREED_BLOCKS),
        ("Windows", "11", FREED_BLOCKS),
    ],
)
def test_allocator_of_a_system(monkeypatch, system, release, expected):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_gpu_memory_variables()
    assert {os.environ[name] for name in ALLOCATOR_VARIABLES} == {expected}
    assert allocator_setting() == expected


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_own_settings_win(monkeypatch, name):
    for other in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    set_gpu_memory_variables()
    assert {other for other in ALLOCATOR_VARIABLES if other in os.environ} == {name}
    assert allocator_setting() == "max_split_size_mb:64"


def test_scripts_set_them_before_pytorch_is_imported():
    program = """
import sys
from vae.system.script import run_script
from vae.system.gpus import allocator_setting

def main(argv):
    assert "torch" not in sys.modules
    print(allocator_setting())
    return 0

run_script("test", main)
"""
    environ = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (GROWING_SEGMENTS, FREED_BLOCKS)
