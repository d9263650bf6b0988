"""Facts about cards, and the speed settings each takes by itself; never the recipe.

Sources: NVIDIA's data sheets for compute capability, memory and bandwidth; dense bf16 rates with fp32
accumulation from the same, except where a comment says otherwise.
"""

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Card:
    """One kind of card: facts, and option values of speed only."""

    name: str
    compute_capability: tuple[int, int]
    vram_gib: float  # as sold, GiB
    bandwidth_gb_s: float
    bf16_tflops: float | None  # dense; None: not known
    settings: dict[str, Any] = field(default_factory=dict)


CARDS = (
    Card("RTX 5090", (12, 0), 32, 1792, 209, {"prefetch_factor": 4}),
    Card("RTX 5060 Ti 16GB", (12, 0), 16, 448, None, {"prefetch_factor": 2}),
    Card("RTX 4090", (8, 9), 24, 1008, 165, {"prefetch_factor": 4}),
    Card("H100", (9, 0), 80, 3350, 989, {"prefetch_factor": 4}),
    Card("H200", (9, 0), 141, 4800, 989, {"prefetch_factor": 4}),
)
CPU_SETTINGS: dict[str, Any] = {"prefetch_factor": 2}

_MEMORY_TOLERANCE = 0.1  # a driver reports up to a tenth less than the card is sold with


def match_card(device_name: str, memory_gib: float) -> Card | None:
    """The card that reports `device_name` and `memory_gib`; None where there is no profile for it.

    Names match as whole words ("H20" is no H200, "RTX 5090 Laptop GPU" no RTX 5090) and memory decides
    between cards that share a name.
    """
    words = re.sub(r"\bNVIDIA\b|\bGeForce\b", "", device_name)
    for card in CARDS:
        base = card.name.removesuffix(" 16GB")
        same_name = re.search(rf"\b{re.escape(base)}\b(?! (Laptop|D\b|SUPER|Ti))", words)
        if same_name and abs(memory_gib / card.vram_gib - 1) <= _MEMORY_TOLERANCE:
            return card
    return None
