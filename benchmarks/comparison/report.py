"""The report: machine, versions, and tables of the cases."""

import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.cases import CASES, Bench
from benchmarks.comparison.measuring import markdown
from vae.checks.machine import installed
from vae.system.gpus import match_card
from vae.system.host import GIB

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("torch", "torchvision", "diffusers", "lpips", "triton")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """GPU or processor, versions, date and commit of a run."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "vae", "benchmarks")),
        "device": str(device.type),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := installed(name))},
    }
    if device.type == "cuda":
        found["card"], found["card_gib"] = gpu_name_and_gib(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def gpu_name_and_gib(device: torch.device) -> tuple[str, float]:
    """Name and GiB as the driver reports them."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, round(properties.total_memory / GIB, 1)


def cpu_name() -> str:
    """Model name of the processor, with the instruction set that determines the speed of bf16."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    model = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    units = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {name} " in text]
    return f"{model[1] if model else 'unknown'} ({units[0] if units else 'no AVX2'})"


def fraction_of_peak(result: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """TFLOP/s of our fastest whole step, and as a fraction of the bf16 peak of the card, if that is known."""
    known = match_card(*gpu_name_and_gib(device))
    row = result["contestants"].get(result.get("fastest", {}).get("ours"), {})
    if known is None or known.bf16_tflops is None or "flops" not in row:
        return {}
    tflops = row["flops"] / row["seconds"] / 1e12
    return {"tflops_per_second": round(tflops, 1), "share_of_bf16_rate": round(tflops / known.bf16_tflops, 3)}


def run_case(bench: Bench, number: int) -> dict[str, Any]:
    """Measure a case, and on a GPU compare case 2 with the peak of the card."""
    result = CASES[number](bench)
    if number == 2 and bench.device.type == "cuda":
        result |= fraction_of_peak(result, bench.device)
    return result


def tables(results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of Markdown: seconds and bytes of all contestants, and ratios, by title of the case."""
    times, ratios = [], []
    for title, found in results.items():
        for name, row in found.get("contestants", {}).items():
            least_and_most = " to ".join(map(str, row.get("seconds_least_and_most", ())))
            peak = row.get("allocated_bytes")
            gib = f"{peak / GIB:.2f}" if peak is not None else None
            times.append([title, name, row.get("seconds", row.get("failure")), least_and_most, gib])
        for key in ("speed", "speed_like_for_like", "memory", "saved"):
            ratio = found.get(key, {})
            for name, value in ratio.items() if isinstance(ratio, dict) else [("", ratio)]:
                ratios.append([title, f"{key} {name}", value])
    return [
        *markdown(["case", "contestant", "seconds", "least and most", "peak GiB"], times),
        "",
        *markdown(["case", "ratio", "found"], ratios),
    ]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
