"""Throughput and memory over resolution, as figures and as an SVG chart without a plotting library."""

import math
from collections.abc import Callable
from html import escape
from typing import Any

import torch

from benchmarks.comparison.cases import Bench, OursKind, network_case
from benchmarks.comparison.measuring import counted
from benchmarks.comparison.ours import Ours
from benchmarks.comparison.theirs import AUTOCAST, BF16, BF16_CHECKPOINTING, Theirs
from benchmarks.comparison.work import Work
from vae.system.host import GIB

TIMED_PX = {"small": (64, 96, 128), "large": (256, 512, 1024, 1536)}
COUNTED_PX = (512, 1024, 2048)
OUR_LEVELS = ("activations", "blocks_encoder", "all")
THEIRS = (AUTOCAST, BF16, BF16_CHECKPOINTING)
META = torch.device("meta")


def curve(bench: Bench) -> dict[str, Any]:
    """Megapixels per second of whole steps of one image, and their counted peak in GiB, by side in px."""
    speed: dict[str, dict[str, float]] = {}
    for px in TIMED_PX[bench.size]:
        found = network_case(bench, Work(px), [OursKind(OUR_LEVELS[0])], list(THEIRS[:2]), whole=True)
        for name, row in found["contestants"].items():
            if "seconds" in row:
                speed.setdefault(name, {})[str(px)] = round(px**2 / 1e6 / row["seconds"], 5)
    memory: dict[str, dict[str, float]] = {}
    for px in COUNTED_PX:
        for level in OUR_LEVELS:
            peak = counted(Ours(Work(px), META, recompute=level).gradients)["counted_bytes"]
            memory.setdefault(f"ours {level}", {})[str(px)] = round(peak / GIB, 3)
        for variant in THEIRS:
            peak = counted(Theirs(Work(px), META, variant).gradients)["counted_bytes"]
            memory.setdefault(f"diffusers {variant.name}", {})[str(px)] = round(peak / GIB, 3)
    return {"megapixels_per_second": speed, "counted_gib_of_one_image": memory}


WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 520, 380, 62, 44, 46, 190
COLORS = {"ours": ("#0b6e4f", "#21a179", "#7bd3b0"), "diffusers": ("#9c2a2a", "#d9603b", "#e8a87c")}


def draw(found: dict[str, Any], machine: dict[str, Any]) -> str:
    """Two panels next to each other, with logarithmic axes."""
    where = machine.get("card") or f"{machine['cpu']}, {machine['threads']} threads"
    panels = [
        ("Whole steps: megapixels per second, " + where, found["megapixels_per_second"]),
        ("Peak of one image's step, counted: GiB", found["counted_gib_of_one_image"]),
    ]
    body = "".join(_panel(title, series, index * WIDTH) for index, (title, series) in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{body}</svg>\n"
    )


def _panel(title: str, series: dict[str, dict[str, float]], offset: int) -> str:
    sides = sorted({int(px) for points in series.values() for px in points})
    values = [value for points in series.values() for value in points.values()]
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    across = _scale(math.log2(sides[0]), math.log2(sides[-1]), offset + LEFT, offset + WIDTH - RIGHT)
    upward = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_text(offset + LEFT, 20, title, "start", "bold")]
    parts.append(_text((offset + LEFT + offset + WIDTH - RIGHT) / 2, HEIGHT - 12, "side of the image, px"))
    for px in sides:
        parts.append(_text(across(math.log2(px)), HEIGHT - BOTTOM + 16, str(px)))
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        y = upward(power)
        parts.append(f'<path d="M{offset + LEFT} {y:.1f}H{offset + WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(offset + LEFT - 6, y + 4, f"{2.0**power:.3g}", "end"))
    used: dict[str, int] = {}
    ends = []
    for name, points in series.items():
        side = name.split()[0]
        color = COLORS[side][used.setdefault(side, 0) % 3]
        used[side] += 1
        dots = [(across(math.log2(int(px))), upward(math.log2(value))) for px, value in points.items()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in dots]
        ends.append((dots[-1][1], name, color))
    y = -math.inf
    for label_y, name, color in sorted(ends):  # labels next to the last points, without overlap
        y = max(label_y + 4, y + 14)
        parts.append(_text(offset + WIDTH - RIGHT + 8, y, name, "start", color=color))
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / max(high - low, 1e-9) * (end - start)


def _text(
    x: float, y: float, words: str, anchor: str = "middle", weight: str = "normal", color: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}">'
        f"{escape(words)}</text>"
    )
