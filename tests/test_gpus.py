"""Cards are matched by name and memory, so that no card gets the settings of a similar one."""

from dataclasses import fields

import pytest

from tests.harness.runs import ROOT
from vae.config.errors import UserError
from vae.config.options import SpeedConfig, all_options
from vae.config.recipes import RECIPES
from vae.gpus import CARDS, CPU_SETTINGS, lookup_card, match_card

# Device name and MiB as NVML reports them, and the expected card, or None if it is unknown.
REPORTED = [
    ("NVIDIA GeForce RTX 5090", 32607, "RTX 5090"),
    ("NVIDIA GeForce RTX 5090 D", 32607, None),
    ("NVIDIA GeForce RTX 5090 D v2", 24463, None),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 24463, None),
    ("NVIDIA GeForce RTX 5080", 16303, "RTX 5080"),
    ("NVIDIA GeForce RTX 5080 Laptop GPU", 16303, None),
    ("NVIDIA GeForce RTX 5080 SUPER", 24463, None),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "RTX 5060 Ti 16GB"),
    ("NVIDIA GeForce RTX 5060 Ti", 8151, None),
    ("NVIDIA GeForce RTX 5060", 8151, None),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"),
    ("NVIDIA GeForce RTX 4090", 49140, None),  # modified, with twice the memory
    ("NVIDIA GeForce RTX 4090 D", 24564, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
    ("NVIDIA H100 80GB HBM3", 81559, "H100"),
    ("NVIDIA H100 PCIe", 81559, None),
    ("NVIDIA H100 NVL", 95830, None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, None),
    ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 81136, None),
    ("NVIDIA H200", 143771, "H200"),
    ("NVIDIA H200 NVL", 143771, None),
    ("NVIDIA H200 MIG 1g.18gb", 16384, None),
    ("NVIDIA H20", 97871, None),
    ("NVIDIA H20-3e", 144384, None),
    ("NVIDIA GH200 480GB", 97871, None),
    ("NVIDIA GH200 144G HBM3e", 147456, None),
    ("NVIDIA H800", 81559, None),
    ("NVIDIA B200", 183359, "B200"),
    ("NVIDIA GB200", 189471, None),
    ("NVIDIA A100-SXM4-80GB", 81920, None),
    ("NVIDIA RTX 5000 Ada Generation", 32760, None),
    ("NVIDIA RTX PRO 5000 Blackwell", 48935, None),
    ("NVIDIA GeForce RTX 3090", 24576, None),
    ("Tesla T4", 15360, None),
    ("AMD Radeon RX 7900 XTX", 24560, None),
    ("", 32607, None),
]


@pytest.mark.parametrize(("name", "mib", "expected"), REPORTED)
def test_match_card_by_reported_name_and_memory(name, mib, expected):
    found = match_card(name, mib / 1024)
    assert (found.name if found else None) == expected


# GiB of cards as PyTorch reports them, from its out-of-memory messages
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("RTX 5090", 31.36),
        ("RTX 5060 Ti 16GB", 15.47),
        ("RTX 4090", 23.64),
        ("H200", 139.8),
        ("B200", 178.35),
    ],
)
def test_match_card_with_the_smaller_memory_of_pytorch(name, gib):
    card = lookup_card(name)
    assert match_card(f"NVIDIA {card.device_name}", gib) == card


def test_match_card_ignores_brands():
    assert (
        match_card("GeForce RTX 5090", 31.8)
        == match_card("RTX 5090", 31.8)
        == match_card("NVIDIA GeForce RTX 5090", 31.4)
    )


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 5090", "RTX 5090"),
        ("rtx5090", "RTX 5090"),
        ("5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("RTX 5060 Ti 16GB", "RTX 5060 Ti 16GB"),
        ("rtx 5060 ti 16 gb", "RTX 5060 Ti 16GB"),
        ("H100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h200", "H200"),
        *[(card.name, card.name) for card in CARDS],
    ],
)
def test_lookup_card_accepts_spellings(typed, name):
    assert lookup_card(typed).name == name


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("RTX 5060 Ti", "RTX 5060 Ti 16GB"),
        ("RTX 5090D", "RTX 5090"),
        ("h20", "H200"),
        ("banana", None),
        ("", None),
    ],
)
def test_unknown_card_lists_the_known_ones(typed, suggested):
    with pytest.raises(UserError) as caught:
        lookup_card(typed)
    message = str(caught.value)
    assert repr(typed) in message
    assert "--vram_gib" in message
    assert all(card.name in message for card in CARDS)
    assert "\n" not in message
    assert f"did you mean {suggested}?" in message if suggested else "did you mean" not in message


def test_every_card_has_sources_and_plausible_facts():
    for card in CARDS:
        assert card.source.startswith("https://"), card.name
        assert card.compute_capability >= (8, 0)
        assert 8 <= card.vram_gib <= 512
        # FLOP per byte: the range of such cards; a typing error in a digit is outside it
        assert 80 <= card.bf16_tflops * 1000 / card.bandwidth_gb_s <= 400, card.name
    names = [card.name for card in CARDS]
    assert len(set(names)) == len(names)


def test_documentation_matches_every_card():
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for card in CARDS:
        sources = " ".join(f"<{address}>" for address in card.source.split())
        facts = f"{card.vram_mib:,} | {card.bandwidth_gb_s:,} | {card.bf16_tflops:,} | {sources} |"
        assert f"| `{card.name}` | {facts}" in page


@pytest.mark.parametrize("settings", [*[card.settings for card in CARDS], CPU_SETTINGS])
def test_card_settings_affect_speed_only(settings):
    speed = {item.name for item in fields(SpeedConfig)} | {
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
    }
    assert settings.keys() <= speed & all_options().keys()


def test_recipes_do_not_depend_on_cards():
    cards = {card.name for card in CARDS}
    for recipe in RECIPES.values():
        assert recipe.values.keys() <= all_options().keys()
        assert not cards & {str(value) for value in recipe.values.values()}
