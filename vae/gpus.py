"""Facts about cards, and the default speed settings of each; never recipe settings.

Sources of the numbers:
  compute capability  https://developer.nvidia.com/cuda-gpus
  memory              memory.total in MiB as nvidia-smi reports it; the driver reserves up to 5 % of a card
  bandwidth, rate     the `source` of each card; rates are for dense bf16 with fp32 accumulation
"""

import re
from dataclasses import dataclass, field
from typing import Any

from vae.config.errors import UserError
from vae.config.values import nearest

_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
BF16_CAPABILITY = (8, 0)  # Ampere, the first with bf16 tensor cores


@dataclass(frozen=True)
class Card:
    """One card model: facts, and option values that affect speed only."""

    name: str  # the value of --gpu
    device_name: str  # as drivers report it, without the manufacturer's brands
    compute_capability: tuple[int, int]
    vram_mib: int
    bandwidth_gb_s: float
    bf16_tflops: float
    source: str  # URLs of data sheets, separated by spaces
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def vram_gib(self) -> float:
        return self.vram_mib / 1024


_FAST_HOST, _SMALL_CARD = {"prefetch_factor": 4}, {"prefetch_factor": 2}
CARDS = (
    Card("RTX 5090", "RTX 5090", (12, 0), 32607, 1792, 209.5, _RTX_BLACKWELL, _FAST_HOST),
    Card("RTX 5080", "RTX 5080", (12, 0), 16303, 960, 112.6, _RTX_BLACKWELL, _SMALL_CARD),
    Card(
        "RTX 5060 Ti 16GB",
        "RTX 5060 Ti",  # the 8 GB card has the same name
        (12, 0),
        16311,
        448,
        47.4,  # 759 "AI TOPS" are sparse FP4; dense bf16 is 1/16 of it, as on the RTX 5090 (3352)
        "https://www.nvidia.com/en-us/geforce/graphics-cards/50-series/rtx-5060-family/",
        _SMALL_CARD,
    ),
    Card("RTX 4090", "RTX 4090", (8, 9), 24564, 1008, 165.2, _ADA, _FAST_HOST),
    Card(
        "H100",
        "H100 80GB HBM3",  # the SXM card; H100 PCIe and NVL are slower
        (9, 0),
        81559,
        3350,
        989,
        "https://www.nvidia.com/en-us/data-center/h100/",
        _FAST_HOST,
    ),
    Card(
        "H200",
        "H200",
        (9, 0),
        143771,
        4800,
        989,
        "https://www.nvidia.com/en-us/data-center/h200/",
        _FAST_HOST,
    ),
    Card(
        "B200",
        "B200",
        (10, 0),
        183359,
        8000,  # the eight cards of a DGX B200 have 64 TB/s
        2250,  # the eight cards of an HGX B200 have 36 PFLOP/s sparse
        "https://www.nvidia.com/en-us/data-center/dgx-b200/ https://www.nvidia.com/en-us/data-center/hgx/",
        _FAST_HOST,
    ),
)
CPU_SETTINGS: dict[str, Any] = {"prefetch_factor": 2}

_MEMORY_TOLERANCE = 0.05  # PyTorch reports up to 1/20 less than nvidia-smi


def match_card(device_name: str, memory_gib: float) -> Card | None:
    """The card that reports `device_name` and `memory_gib`; None if it is not in `CARDS`.

    The whole name must match: "H200 NVL", "RTX 5090 D", "RTX 5090 Laptop GPU" and MIG slices are other cards.
    The memory must match too, because it distinguishes cards with the same name.
    """
    name = _without_brands(device_name)
    for card in CARDS:
        if name == _without_brands(card.device_name) and (
            abs(memory_gib / card.vram_gib - 1) <= _MEMORY_TOLERANCE
        ):
            return card
    return None


def lookup_card(name: str) -> Card:
    """The card that a user calls `name`; raises UserError if it is not in `CARDS`."""
    wanted = _without_brands(name)
    for card in CARDS:
        names = [card.name]
        if not card.name.startswith(f"{card.device_name} "):  # our name is more specific than theirs
            names.append(card.device_name)
        if wanted in map(_without_brands, names):
            return card
    known = [card.name for card in CARDS]
    raise UserError(
        f"--gpu {name!r} is unknown{nearest(name.upper(), known)} (known: {', '.join(known)}; "
        "for any other card set its memory instead, for example --vram_gib 12)"
    )


def _without_brands(name: str) -> str:
    """A card's name in lower case without manufacturer, brands and spaces, for comparison."""
    return re.sub(r"nvidia|geforce|rtx|\s", "", name.casefold())
