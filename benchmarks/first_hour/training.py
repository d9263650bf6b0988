"""Part 8: the trainer on photographs: 200 steps and a resume, and both initial weights for 2,000 steps."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_hour.case import (
    ROOT,
    Case,
    Settings,
    last_line,
    markdown,
    rounded,
    run_words,
    verdict,
)
from benchmarks.first_hour.trainer_step import SMALL
from vae.losses.trunk_weights import URLS
from vae.system.errors import EXIT_SAVED_RESUMABLE

TITLE = "Training on photographs: 200 steps and a resume; initial weights warm and default for 2,000 steps"
STOP_SECONDS = 30  # for the step, the validation and the checkpoint after a signal


def cases(settings: Settings) -> list[Case]:
    return [
        Case("200 steps and a resume", 60, _train_and_resume),
        Case("warm", 60, partial(_train_from, init="warm")),
        Case("default", 60, partial(_train_from, init="default")),
    ]


def _images(settings: Settings) -> str:
    """--data_path, or images drawn by the project."""
    if settings.data_path:
        return settings.data_path
    folder = settings.out / "demo"
    if not folder.exists():
        count, side = ("8", "96") if settings.quick else ("256", "512")
        words = [sys.executable, "prepare_data.py", "--mode", "demo", "--output_dir", str(folder)]
        done = run_words([*words, "--count", count, "--target_size", side], settings.seconds_left)
        if done.returncode:
            raise RuntimeError(last_line(done.stderr))
    return str(folder)


def _perceptual() -> dict[str, int]:
    """LPIPS if its weights are on this machine: nothing is downloaded."""
    weights = Path(torch.hub.get_dir(), "checkpoints", URLS["vgg"].rpartition("/")[2])
    return {} if weights.exists() else {"perceptual_weight": 0}


def _train(settings: Settings, folder: Path, **options: Any) -> dict[str, Any]:
    """Run or continue train_vae.py; when no time is left, it gets SIGTERM and saves a checkpoint."""
    given = {"data_path": _images(settings), "output_dir": folder, "resume_from": "latest", "device": "cuda"}
    given |= {"num_epochs": 1000, "checkpoint_freq": 1000, "save_samples_freq": 0}
    given |= {**(SMALL if settings.quick else {}), **options}
    words = [sys.executable, "train_vae.py", "--mixed_precision"]
    for name, value in given.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    with (settings.out / "training.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(1.0, settings.seconds_left - STOP_SECONDS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            code = process.wait(3 * STOP_SECONDS)
    if code == EXIT_SAVED_RESUMABLE:
        raise RuntimeError(f"stopped at step {_last_step(folder)}: the same command continues it")
    if code:
        raise RuntimeError(f"train_vae.py: exit code {code}, see {settings.out / 'training.log'}")
    return _curves(folder)


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def _last_step(folder: Path) -> int:
    return max((record["step"] for record in _records(folder)), default=0)


def _curves(folder: Path) -> dict[str, Any]:
    """Losses, PSNR by step, and speed of a run."""
    records = _records(folder)
    train = [r for r in records if r["kind"] == "train"]
    psnr = {
        str(r["step"]): r["psnr"] for r in records if r["kind"] == "validation" and r.get("psnr") is not None
    }
    rates = sorted(r["images_per_second"] for r in train if r.get("images_per_second"))
    baseline = next((r.get("psnr") for r in records if r["kind"] == "baseline" and "bicubic" in str(r)), None)
    memory = next((r for r in reversed(records) if r["kind"] == "memory"), {})
    return {
        "steps": _last_step(folder),
        "first_loss": train[0]["loss"] if train else None,
        "last_loss": train[-1]["loss"] if train else None,
        "psnr_by_step": {step: rounded(value) for step, value in psnr.items()},
        "bicubic_psnr": baseline,
        "images_per_second": rounded(rates[len(rates) // 2]) if rates else None,
        "predicted_gib": memory.get("predicted_peak_gib"),
        "reserved_gib": memory.get("memory_reserved_gib"),
    }


def _train_and_resume(settings: Settings) -> dict[str, Any]:
    """200 steps at 256 px with LPIPS, then 20 more from the checkpoint."""
    steps, more, size = (4, 2, 64) if settings.quick else (200, 20, 256)
    folder = settings.out / "runs" / "resume"
    options = {"image_size": size, "batch_size": 2 if settings.quick else 8, "val_freq": 1000, "log_freq": 1}
    options |= _perceptual()
    first = _train(settings, folder, **options, max_steps=steps)
    started = time.monotonic()
    second = _train(settings, folder, **options, max_steps=steps + more)
    losses = [record["loss"] for record in _records(folder) if record["kind"] == "train"]
    right = second["steps"] == steps + more and losses[-1] is not None and losses[-1] < losses[0]
    return {
        **first,
        "resumed_to": second["steps"],
        "loss_after_resume": second["last_loss"],
        "resume_seconds": round(time.monotonic() - started, 1),
        "verdict": verdict(right),
    }


def _train_from(settings: Settings, init: str) -> dict[str, Any]:
    """The default network on crops of 64 px, L1 and KL, as in docs/measurements.md for a small network."""
    steps, size = (6, 32) if settings.quick else (2000, 64)
    folder = settings.out / "runs" / init
    options = {"init": init, "image_size": size, "batch_size": 2 if settings.quick else 4, "max_steps": steps}
    options |= {"perceptual_weight": 0, "val_split": 0.1, "val_freq": 4, "max_val_images": 32}
    found = _train(settings, folder, **options, checkpoint_steps=500, lr_schedule="constant")
    return {**found, "verdict": verdict(True)}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, found in results.items():
        figures = [found.get(key) for key in ("steps", "first_loss", "last_loss", "images_per_second")]
        rows.append([name, *figures, found.get("predicted_gib"), found.get("reserved_gib"), found["verdict"]])
    header = ["run", "steps", "first loss", "last loss", "images/s", "predicted GiB", "reserved GiB", ""]
    lines = [*markdown(header, rows), ""]
    curves = {name: found["psnr_by_step"] for name, found in results.items() if found.get("psnr_by_step")}
    steps = sorted({int(step) for curve in curves.values() for step in curve})
    shown = steps[:: max(1, len(steps) // 10)]
    rows = [[name, *(curve.get(str(step)) for step in shown)] for name, curve in curves.items()]
    return lines + (markdown(["PSNR, dB, at step", *map(str, shown)], rows) if rows else [])
