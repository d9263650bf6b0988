"""Throughput and memory over resolution, as figures and as an SVG chart."""

import io
import itertools
from typing import Any

import torch
from matplotlib import rc_context

from benchmarks.comparison.cases import Bench, OursKind, network_case
from benchmarks.comparison.measuring import counted
from benchmarks.comparison.ours import Ours
from benchmarks.comparison.theirs import AUTOCAST, BF16, BF16_CHECKPOINTING, Theirs
from benchmarks.comparison.work import Work
from vae.charts import new_figure
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


COLORS = {"ours": ("#0b6e4f", "#21a179", "#7bd3b0"), "diffusers": ("#9c2a2a", "#d9603b", "#e8a87c")}


def draw(found: dict[str, Any], machine: dict[str, Any]) -> str:
    """An SVG file with two panels and logarithmic axes; the same values give the same file."""
    where = machine.get("card") or f"{machine['cpu']}, {machine['threads']} threads"
    figure, axes = new_figure(1100, 400, columns=2)
    _panel(axes[0], "Whole steps: megapixels per second, " + where, found["megapixels_per_second"])
    _panel(axes[1], "Peak of one image's step, counted: GiB", found["counted_gib_of_one_image"])
    content = io.StringIO()
    with rc_context({"svg.hashsalt": "curve", "svg.fonttype": "none"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _panel(axes: Any, title: str, series: dict[str, dict[str, float]]) -> None:
    colors = {side: iter(itertools.cycle(shades)) for side, shades in COLORS.items()}
    for name, points in series.items():
        sides = [int(px) for px in points]
        axes.plot(sides, list(points.values()), marker="o", color=next(colors[name.split()[0]]), label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({int(px) for points in series.values() for px in points})
    axes.set_xticks(ticks, ticks)
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("side of the image, px")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
