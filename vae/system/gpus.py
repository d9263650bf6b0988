"""Facts about cards, the default speed settings of each (never recipe settings), and PyTorch's allocator.

Sources of the numbers:
  compute capability  https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus
  memory              memory.total in MiB as nvidia-smi reports it; the driver reserves up to 5 % of a card
  bandwidth, rate     the `source` of each card; rates are for dense bf16 with fp32 accumulation
"""

import difflib
import os
import platform
import re
from dataclasses import dataclass, field
from typing import Any

from vae.system.errors import UserError

_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
BF16_CAPABILITY = (8, 0)  # Ampere, the first with bf16 tensor cores


@dataclass(frozen=True)
class Card:
    """One card model: facts, and option values that affect speed only."""

    name: str  # the value of --gpu
    device_name: str  # drivers report this name, after the manufacturer's brands
    compute_capability: tuple[int, int]
    vram_mib: int
    bandwidth_gb_s: float | None  # None: not recorded here
    bf16_tflops: float | None
    source: str  # URLs of data sheets, separated by spaces
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def vram_gib(self) -> float:
        return self.vram_mib / 1024

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= BF16_CAPABILITY


_SMALL_CARD = {"prefetch_factor": 2}
_CARDS_WITH_RATES = (
    Card("RTX 5090", "RTX 5090", (12, 0), 32607, 1792, 209.5, _RTX_BLACKWELL),
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
    Card("RTX 4090", "RTX 4090", (8, 9), 24564, 1008, 165.2, _ADA),
    Card(
        "H100",
        "H100 80GB HBM3",  # the SXM card; H100 PCIe and NVL are slower
        (9, 0),
        81559,
        3350,
        989,
        "https://www.nvidia.com/en-us/data-center/h100/",
    ),
    Card("H200", "H200", (9, 0), 143771, 4800, 989, "https://www.nvidia.com/en-us/data-center/h200/"),
    Card(
        "B200",
        "B200",
        (10, 0),
        183359,
        8000,  # the eight cards of a DGX B200 have 64 TB/s
        2250,  # the eight cards of an HGX B200 have 36 PFLOP/s sparse
        "https://www.nvidia.com/en-us/data-center/dgx-b200/ https://www.nvidia.com/en-us/data-center/hgx/",
    ),
)
# Other cards, with the default settings, by compute capability: the name that drivers report, and the memory
# in GiB; a tuple for cards that share a name, the first version first. GeForce and RTX cards: as advertised,
# https://www.nvidia.com/en-us/geforce/graphics-cards/compare/ and
# https://www.nvidia.com/en-us/products/workstations/. Data-centre cards: as nvidia-smi reports it, with ECC.
# fmt: off
_MEMORY_GIB: dict[tuple[int, int], dict[str, float | tuple[float, ...]]] = {
    (12, 0): {
        "RTX 5090 D": 32, "RTX 5090 D v2": 24, "RTX 5070 Ti": 16, "RTX 5070": 12, "RTX 5060 Ti": 8,
        "RTX 5060": 8, "RTX 5050": 8,
        "RTX 5090 Laptop GPU": 24, "RTX 5080 Laptop GPU": 16, "RTX 5070 Ti Laptop GPU": 12,
        "RTX 5070 Laptop GPU": 8, "RTX 5060 Laptop GPU": 8, "RTX 5050 Laptop GPU": 8,
        "RTX PRO 6000 Blackwell Workstation Edition": 95.6,
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 95.6,
        "RTX PRO 6000 Blackwell Server Edition": 95.6,
        "RTX PRO 5000 Blackwell": 48, "RTX PRO 4500 Blackwell": 32, "RTX PRO 4000 Blackwell": 24,
        "RTX PRO 2000 Blackwell": 16,
    },
    (9, 0): {"H100 PCIe": 79.6, "H100 NVL": 93.6, "H200 NVL": 140.4, "GH200 480GB": 95.6, "H20": 95.6},
    (8, 9): {
        "RTX 4090 D": 24, "RTX 4080 SUPER": 16, "RTX 4080": 16, "RTX 4070 Ti SUPER": 16, "RTX 4070 Ti": 12,
        "RTX 4070 SUPER": 12, "RTX 4070": 12, "RTX 4060 Ti": (8, 16), "RTX 4060": 8,
        "RTX 4090 Laptop GPU": 16, "RTX 4080 Laptop GPU": 12, "RTX 4070 Laptop GPU": 8,
        "RTX 4060 Laptop GPU": 8, "RTX 4050 Laptop GPU": 6,
        "L40S": 45, "L40": 45, "L4": 22.5,
        "RTX 6000 Ada Generation": 48, "RTX 5000 Ada Generation": 32, "RTX 4500 Ada Generation": 24,
        "RTX 4000 Ada Generation": 20, "RTX 4000 SFF Ada Generation": 20, "RTX 2000 Ada Generation": 16,
    },
    (8, 6): {
        "RTX 3090 Ti": 24, "RTX 3090": 24, "RTX 3080 Ti": 12, "RTX 3080": (10, 12), "RTX 3070 Ti": 8,
        "RTX 3070": 8, "RTX 3060 Ti": 8, "RTX 3060": (12, 8), "RTX 3050": (8, 6),
        "RTX 3080 Ti Laptop GPU": 16, "RTX 3080 Laptop GPU": (8, 16), "RTX 3070 Ti Laptop GPU": 8,
        "RTX 3070 Laptop GPU": 8, "RTX 3060 Laptop GPU": 6, "RTX 3050 Ti Laptop GPU": 4,
        "RTX 3050 Laptop GPU": (4, 6),
        "A40": 45, "A16": 15, "A10": 22.5, "A10G": 22.5, "A2": 15,
        "RTX A6000": 48, "RTX A5500": 24, "RTX A5000": 24, "RTX A4500": 20, "RTX A4000": 16, "RTX A2000": 6,
        "RTX A2000 12GB": 12,
    },
    (8, 0): {
        "A100-SXM4-40GB": 40, "A100-PCIE-40GB": 40, "A100-SXM4-80GB": 80, "A100 80GB PCIe": 80, "A30": 24,
    },
    (7, 5): {
        "RTX 2080 Ti": 11, "RTX 2080 SUPER": 8, "RTX 2080": 8, "RTX 2070 SUPER": 8, "RTX 2070": 8,
        "RTX 2060 SUPER": 8, "RTX 2060": (6, 12), "TITAN RTX": 24,
        "GTX 1660 Ti": 6, "GTX 1660 SUPER": 6, "GTX 1660": 6, "GTX 1650 SUPER": 4, "GTX 1650 Ti": 4,
        "GTX 1650": 4, "GTX 1630": 4,
        "Quadro RTX 8000": 48, "Quadro RTX 6000": 24, "Quadro RTX 5000": 16, "Quadro RTX 4000": 8,
        "Tesla T4": 15,
    },
    (7, 0): {
        "Tesla V100-SXM2-16GB": 16, "Tesla V100-PCIE-16GB": 16, "Tesla V100-SXM2-32GB": 32,
        "Tesla V100-PCIE-32GB": 32, "TITAN V": 12,
    },
}
# fmt: on


def _cards_by_memory() -> tuple[Card, ...]:
    cards = []
    shared = {card.device_name for card in _CARDS_WITH_RATES}
    for capability, models in _MEMORY_GIB.items():
        for device_name, sizes in models.items():
            several = isinstance(sizes, tuple) or device_name in shared
            for gib in sizes if isinstance(sizes, tuple) else (sizes,):
                name = f"{device_name} {gib:g}GB" if several else device_name
                cards.append(Card(name, device_name, capability, round(gib * 1024), None, None, ""))
    return tuple(cards)


CARDS = (*_CARDS_WITH_RATES, *_cards_by_memory())
CPU_SETTINGS: dict[str, Any] = {"prefetch_factor": 2}

# PyTorch reports up to 1/20 less than nvidia-smi, and ECC takes 1/16 of a workstation card. Cards that share
# a name differ by at least a sixth (10 and 12 GB).
_MEMORY_TOLERANCE = 0.1


def match_card(device_name: str, memory_gib: float) -> Card | None:
    """The card that reports `device_name` and `memory_gib`; None if it is not in `CARDS`.

    The whole name must match: "RTX 5090 D", "RTX 5090 Laptop GPU" and MIG slices are other cards than the RTX
    5090. The memory must match too, because it distinguishes cards with the same name.
    """
    name = _without_brands(device_name)
    for card in CARDS:
        if name == _without_brands(card.device_name) and (
            abs(memory_gib / card.vram_gib - 1) <= _MEMORY_TOLERANCE
        ):
            return card
    return None


def find_cards(name: str) -> list[Card]:
    """The cards that a user may mean by `name`, in the order of `CARDS`; UserError if there is none.

    Some cards share a name, such as the RTX 3060 with 12 and with 8 GB. A shorter name finds all cards that
    contain its words: "A100" and "A100 80GB" find "A100-SXM4-80GB".
    """
    wanted = _without_brands(name)
    cards = [card for card in CARDS if wanted == _without_brands(card.name)]
    cards = cards or [card for card in CARDS if wanted == _without_brands(card.device_name)]
    words = _words(name)
    if any(re.search(r"\d(?!\d*gb$)", word) for word in words):  # more than a memory size
        cards = cards or [card for card in CARDS if words <= _words(f"{card.name} {card.device_name}")]
    if cards:
        return cards
    gib = re.match(r"\s*(\d{1,3}(?:\.\d+)?)\s*(?:gi?b)?\s*$", name, re.IGNORECASE)
    similar = difflib.get_close_matches(name.upper(), [card.name for card in CARDS], n=3, cutoff=0.7)
    hint = f": did you mean {' or '.join(similar)}?" if similar and not gib else ""
    raise UserError(
        f"--gpu {name!r} is unknown{hint} (vae/system/gpus.py lists all cards; for any other card set its "
        f"memory instead, for example --vram_gib {gib[1] if gib else 12})"
    )


def _without_brands(name: str) -> str:
    """A card's name in lower case without manufacturer, brands and spaces, for comparison."""
    return re.sub(r"nvidia|geforce|tesla|[rg]tx|\s", "", name.casefold())


def _words(name: str) -> set[str]:
    """The words of a card's name in lower case, without manufacturer and brands."""
    words = re.split(r"[\s-]+", re.sub(r"\b(\d+)\s+gb\b", r"\1gb", name.casefold()))
    return set(words) - {"", "nvidia", "geforce", "tesla", "rtx", "gtx", "gpu"}


# ---- PyTorch's allocator -----------------------------------------------------------------------------------
# How it uses a card's memory: environment variables, read when PyTorch starts.

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name

# Segments that grow: freed memory is used again whatever its size. With PyTorch's default, segments of fixed
# size, a step reserves up to 15 % more (benchmarks/LOG.md, "Memory that PyTorch reserves").
GROWING_SEGMENTS = "expandable_segments:True"
# PyTorch supports them on Linux only, and under WSL the driver refuses their calls on some machines
# (github.com/pytorch/pytorch/issues/192330). The other remedy: from 90 % of the limit on, free the blocks
# that have not been used for longest. max_split_size_mb made the same steps allocate anew in every step.
FREED_BLOCKS = "garbage_collection_threshold:0.9"


def growing_segments_supported(system: str, release: str) -> bool:
    """Whether PyTorch's growing segments work, from the system's name and the kernel's release."""
    return system == "Linux" and "microsoft" not in release.lower()


def set_gpu_memory_variables() -> None:
    """Set the variables of this process and its children; a user's own settings win."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        supported = growing_segments_supported(platform.system(), platform.release())
        for name in ALLOCATOR_VARIABLES:  # PyTorch 2.9 ignores the first, for this setting
            os.environ[name] = GROWING_SEGMENTS if supported else FREED_BLOCKS


def allocator_setting() -> str:
    """The setting of PyTorch's allocator in this process, or "" for PyTorch's own."""
    return next((os.environ[name] for name in reversed(ALLOCATOR_VARIABLES) if name in os.environ), "")
