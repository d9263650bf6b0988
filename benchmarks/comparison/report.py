"""The report: machine, versions, and a table of the cases."""

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vae.system.gpus import match_card
from vae.system.host import GIB

PACKAGES = ("torch", "torchvision", "diffusers", "lpips", "triton")


def describe_machine(device: torch.device, root: Path) -> dict[str, Any]:
    """GPU or processor, versions, date and commit of a run."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git(root, "rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git(root, "status", "--porcelain", "--", "vae", "benchmarks")),
        "device": str(device.type),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
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


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor, with the instruction set that determines the speed of bf16."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    units = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    return f"{facts.get('model name', 'unknown')} ({units[0] if units else 'no AVX2'})"


def fraction_of_peak(result: dict[str, Any], card_name: str, card_gib: float) -> dict[str, Any]:
    """TFLOP/s of our fastest whole step, and as a fraction of the bf16 peak of the card, if that is known."""
    known = match_card(card_name, card_gib)
    row = result["contestants"].get(result.get("fastest", {}).get("ours"), {})
    if known is None or known.bf16_tflops is None or "flops" not in row:
        return {}
    tflops = row["flops"] / row["seconds"] / 1e12
    return {"tflops_per_second": round(tflops, 1), "share_of_bf16_rate": round(tflops / known.bf16_tflops, 3)}


def print_case(number: int, title: str, result: dict[str, Any]) -> None:
    """Print one case as text."""
    size = result.get("image_size") or result.get("shape") or f"width {result.get('width')}"
    batch = f" px x {result['batch']}" if "batch" in result else ""
    print(f"\n{number}. {title}: {size}{batch}")
    for name, row in result["contestants"].items():
        print(f"   {name:<52} {_row(row)}")
    for key in ("speed", "speed_like_for_like", "memory", "saved"):
        if key in result:
            print(f"   {key}: {_ratios(result[key])}")
    for goal in result["goals"]:
        print(
            f"   {'met ' if goal['met'] else 'MISSED'} {goal['what']}: {goal['found']} (goal {goal['goal']})"
        )
        if not goal["met"]:
            print(f"          reached if: {goal['reached_if']}")


def _row(row: dict[str, Any]) -> str:
    if "failure" in row:
        return row["failure"]
    least, most = row["seconds_least_and_most"]
    text = f"{row['seconds']:.4g} s ({least:.3g} to {most:.3g}, {row['repeats']} repeats)"
    if "allocated_bytes" in row:
        text += f", peak {row['allocated_bytes'] / GIB:.2f} GiB"
    return text


def _ratios(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {ratio}" for name, ratio in value.items())
    return str(value)


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
