"""Cards by the names and memory that drivers report: a card's settings never reach its namesakes."""

from dataclasses import fields

import pytest

from vae.config.options import SpeedConfig, all_options
from vae.config.recipes import RECIPES
from vae.gpus import CARDS, CPU_SETTINGS, match_card

# Device name and MiB as NVML reports them; the card it is, or None where there is no profile for it.
REPORTED = [
    ("NVIDIA GeForce RTX 5090", 32607, "RTX 5090"),
    ("NVIDIA GeForce RTX 5090 D", 32607, None),
    ("NVIDIA GeForce RTX 5090 D v2", 24463, None),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 24463, None),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "RTX 5060 Ti 16GB"),
    ("NVIDIA GeForce RTX 5060 Ti", 8151, None),
    ("NVIDIA GeForce RTX 5060", 8151, None),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX 4090"),
    ("NVIDIA GeForce RTX 4090 D", 24564, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
    ("NVIDIA H100 80GB HBM3", 81559, "H100"),
    ("NVIDIA H100 NVL", 95830, None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, None),
    ("NVIDIA H200", 143771, "H200"),
    ("NVIDIA H20", 97871, None),
    ("NVIDIA H20-3e", 144384, None),
    ("NVIDIA GH200 480GB", 97871, None),
    ("NVIDIA GH200 144G HBM3e", 147456, None),
    ("NVIDIA H800", 81559, None),
    ("NVIDIA A100-SXM4-80GB", 81920, None),
    ("NVIDIA RTX 5000 Ada Generation", 32760, None),
    ("NVIDIA GeForce RTX 3090", 24576, None),
    ("Tesla T4", 15360, None),
]


@pytest.mark.parametrize(("name", "mib", "expected"), REPORTED)
def test_names_that_drivers_report(name, mib, expected):
    found = match_card(name, mib / 1024)
    assert (found.name if found else None) == expected


def test_names_work_with_and_without_the_makers():
    assert (
        match_card("GeForce RTX 5090", 31.8)
        == match_card("RTX 5090", 31.8)
        == match_card("NVIDIA GeForce RTX 5090", 31.4)
    )


@pytest.mark.parametrize("settings", [*[card.settings for card in CARDS], CPU_SETTINGS])
def test_card_settings_are_of_speed_only(settings):
    speed = {item.name for item in fields(SpeedConfig)} | {
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
    }
    assert settings.keys() <= speed & all_options().keys()


def test_no_recipe_depends_on_a_card():
    cards = {card.name for card in CARDS}
    for recipe in RECIPES.values():
        assert recipe.values.keys() <= all_options().keys()
        assert not cards & {str(value) for value in recipe.values.values()}
