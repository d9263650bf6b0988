"""The parts of the first hour: commands of the project, and how their figures are read.

A part is a list of cases; a case is one command. Nothing is measured here: the trainer, the checks, the tests
and the comparison measure, and `read` takes what they print or write.
"""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
SMALL = {"channels": [32, 64], "layers_per_block": 1, "norm_groups": 8}  # with --quick
NO_ARITHMETIC = "no arithmetic"  # the verdict on numbers of a device that computes nothing
# Relative difference of the losses of the first four steps. A card draws other noise than a CPU: on a CPU,
# noise of the opposite sign changes them by up to 0.9 % in fp32, and by up to 8.3 % with bf16 in addition.
TOLERANCE = {"fp32": 0.02, "bf16": 2**-3}
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"


@dataclass(frozen=True)
class Machine:
    """What the cases depend on."""

    has_card: bool
    computes: bool  # a stand-in for a card runs everything but returns no results
    quick: bool
    data_path: Path

    def verdict(self, is_right: bool) -> str:
        """The verdict on a numerical comparison."""
        return "ok" if is_right else "WRONG" if self.computes else NO_ARITHMETIC


@dataclass(frozen=True)
class Case:
    """A command; `read` takes its folder and its output and returns plain data, or raises ValueError."""

    name: str
    words: list[str]
    read: Callable[[Path, str], dict[str, Any]]
    codes: tuple[int, ...] = (0,)  # exit codes with results


def folder_name(name: str) -> str:
    """The folder of a case."""
    return re.sub(r"\W+", "-", name).strip("-")


def check_cases(machine: Machine, folder: Path) -> list[Case]:
    """Is everything here, and what will fit?"""
    return [
        Case(
            "check",
            [PYTHON, "check_compatibility.py", "--json"],
            partial(_read_check, machine),
            (0, 1),
        ),
        Case("plan", [PYTHON, "check_compatibility.py", "--plan"], lambda _, printed: {"table": printed}),
    ]


def _read_check(machine: Machine, folder: Path, printed: str) -> dict[str, Any]:
    found = json.loads(printed)
    failed = [f"{check['title']}: {check['found']}" for check in found["checks"] if check["status"] == "fail"]
    driver = found["environment"]["smi"]["driver"]
    return {**found["counts"], "driver": driver, "failed": failed, "verdict": machine.verdict(not failed)}


def test_cases(machine: Machine, folder: Path) -> list[Case]:
    """Do the tests that need a card pass?"""
    words = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "--tb=line", "-p", "no:cacheprovider"]
    words += ["tests/test_device.py"] * machine.quick
    return [Case("pytest -m gpu", words, partial(_read_tests, machine), (0, 1, 5))]  # 5: none selected


def _read_tests(machine: Machine, folder: Path, printed: str) -> dict[str, Any]:
    last = printed.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", printed, re.M)
    right = not failed and not counts.get("failed") and not counts.get("error")
    return {**counts, "tests_failed": failed, "verdict": machine.verdict(right)}


def correctness_cases(machine: Machine, folder: Path) -> list[Case]:
    """Are the losses of the card those of the CPU? And, with compute-sanitizer, does no kernel overrun?"""
    options: dict[str, Any] = {"image_size": 64, "batch_size": 2, "max_steps": 4, "log_freq": 1, **SMALL}
    fp32 = {"enable_tf32": False}
    kinds: dict[str, dict[str, Any]] = {"fp32": fp32, "bf16": {"use_bf16": True}}
    for level in (
        ("all",) if machine.quick else ("activations", "top_level", "blocks", "blocks_encoder", "all")
    ):
        kinds[f"fp32 recompute {level}"] = {**fp32, "recompute": level}
    kinds["fp32 NCHW"] = {**fp32, "channels_last": False}
    kinds["fp32 passes of one"] = {**fp32, "micro_batch_size": 1}
    kinds["bf16 compiled"] = {"use_bf16": True, "use_torch_compile": True}
    reference = folder / "cpu" / "run"
    found = [
        _train(
            "cpu",
            machine,
            folder,
            partial(_read_run, machine),
            {**options, **fp32, "device": "cpu", "kernels": "auto"},
        )
    ]
    if not machine.has_card:
        return found
    for name, kind in kinds.items():
        read = partial(_read_losses, machine, reference, TOLERANCE[name.split()[0]])
        found.append(_train(name, machine, folder, read, {**options, **kind}))
    if program := shutil.which("compute-sanitizer") or shutil.which(SANITIZER):
        words = [program, "--tool", "memcheck", "--error-exitcode", "9"]
        step = _train("memcheck", machine, folder, _no_figures, {**options, **kinds["bf16"], "max_steps": 2})
        found.append(Case(step.name, words + step.words, step.read))
    return found


def _no_figures(folder: Path, printed: str) -> dict[str, Any]:
    return {"verdict": "ok"}


def _read_losses(
    machine: Machine, reference: Path, tolerance: float, folder: Path, printed: str
) -> dict[str, Any]:
    expected, losses = (
        [record["loss"] for record in _records(run) if record["kind"] == "train"]
        for run in (reference, folder / "run")
    )
    if not expected or len(losses) != len(expected):
        raise ValueError(f"{len(losses)} losses, and {len(expected)} of the CPU")
    pairs = zip(losses, expected, strict=True)  # None: not finite
    differences = [math.inf if None in (a, b) else abs(a - b) / abs(b) for a, b in pairs]
    _delete_weights(folder)
    largest = max(differences)
    verdict = machine.verdict(largest < tolerance)
    return {"difference": f"{largest:.1e}", "tolerance": tolerance, "losses": losses, "verdict": verdict}


def profile_cases(machine: Machine, folder: Path) -> list[Case]:
    """Does each profile fit as planned, and how fast is it?"""
    names = ["small"] if machine.quick else ["standard", "small", "fast", "high", "ultra", "maximum"]
    small = {**SMALL, "image_size": 64, "batch_size": 2} if machine.quick else {}
    read = partial(_read_run, machine)
    return [
        _train(f"{name}{suffix}", machine, folder, read, {**small, **SPEED_RUN, "profile": name, **options})
        for suffix, options in (("", {}), (" without a graph", {"cuda_graph": False}))
        for name in names
        if machine.has_card or not suffix
    ]


SPEED_RUN = {"mixed_precision": True, "max_steps": 12, "log_freq": 3}
WARMUP_STEPS = 6  # cuDNN's search, first allocations, capture of the CUDA graph, clocks


def speed_cases(machine: Machine, folder: Path) -> list[Case]:
    """What do the CUDA graph, torch.compile, our kernels and NHWC change?"""
    kinds: dict[str, dict[str, Any]] = {
        "without a graph": {"cuda_graph": False},
        "graph": {"cuda_graph": True},
        "compiled": {"cuda_graph": False, "use_torch_compile": True},
        "kernels torch": {"cuda_graph": False, "kernels": "torch"},
        "NCHW": {"cuda_graph": False, "channels_last": False},
        "fp32": {"cuda_graph": False, "mixed_precision": False},
    }
    if not machine.has_card:
        kinds = {"eager": {}}
    small = SMALL if machine.quick else {}
    read = partial(_read_run, machine)
    return [
        _train(
            f"{size} px {name}",
            machine,
            folder,
            read,
            {**small, **SPEED_RUN, "image_size": size, "batch_size": 2, **kind},
        )
        for size in ((64,) if machine.quick else (256, 1024))
        for name, kind in kinds.items()
    ]


def comparison_cases(machine: Machine, folder: Path) -> list[Case]:
    """How fast is it compared with diffusers, eager and compiled? The most important cases first."""
    numbers = (7,) if machine.quick else (2, 3, 9, 7, 8, 10, 11, 1, 6, 4, 5)
    words = [PYTHON, "benchmarks/run.py", *["--small", "--rounds", "1"] * machine.quick]
    found = []
    for number in numbers:
        name = f"case {number}"
        file = folder / folder_name(name) / "comparison.json"
        found.append(Case(name, [*words, "--cases", str(number), "--out", str(file)], _read_comparison))
    return found


def _read_comparison(folder: Path, printed: str) -> dict[str, Any]:
    (found,) = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["cases"].values()
    seconds = {name: row.get("seconds", row.get("failure")) for name, row in found["contestants"].items()}
    missed = [
        f"{goal['what']} {goal['found']} ({goal['goal']})" for goal in found["goals"] if not goal["met"]
    ]
    return {"title": found["title"], "speed": found.get("speed"), "seconds": seconds, "goals_missed": missed}


def training_cases(machine: Machine, folder: Path) -> list[Case]:
    """Does a run on photographs learn, and go on from its checkpoint?"""
    steps, more, size = (4, 2, 64) if machine.quick else (200, 20, 256)
    options = {"image_size": size, "batch_size": 2 if machine.quick else 8, "log_freq": 2, "val_split": 0.1}
    options |= {"mixed_precision": True, "num_epochs": 1000, "checkpoint_freq": 1000, "val_freq": 1000}
    options |= {"resume_from": "latest", **(SMALL if machine.quick else {})}
    found = []
    for name, last in (("from the start", steps), ("resumed", steps + more)):
        read = partial(_read_progress, machine, last)
        found.append(_train(name, machine, folder, read, {**options, "max_steps": last}, run=folder / "run"))
    return found


def _read_progress(machine: Machine, last_step: int, folder: Path, printed: str) -> dict[str, Any]:
    found = _figures(folder.parent / "run")
    if found["steps"] != last_step:
        raise ValueError(f"the run is at step {found['steps']}, not {last_step}")
    learned = (
        None not in (found["first_loss"], found["last_loss"]) and found["last_loss"] < found["first_loss"]
    )
    return {**found, "verdict": machine.verdict(learned)}


def _train(
    name: str,
    machine: Machine,
    folder: Path,
    read: Callable[[Path, str], dict[str, Any]],
    options: dict[str, Any],
    run: Path | None = None,
) -> Case:
    """A case that trains; `options` are values of flags, and a bool becomes --flag or --no-flag."""
    given: dict[str, Any] = {
        "data_path": machine.data_path,
        "output_dir": run or folder / folder_name(name) / "run",
    }
    given |= {"perceptual_net": "random", "val_split": 0, "save_samples_freq": 0, "upscale": True}
    given |= {"kernels": "triton"} if machine.has_card else {}  # an error if one fails, no replacement
    words = [PYTHON, "train_vae.py"]
    for flag, value in {**given, **options}.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return Case(name, words, read)


def _read_run(machine: Machine, folder: Path, printed: str) -> dict[str, Any]:
    found = _figures(folder / "run")
    plan = re.search(r"^plan +(.*)", printed, re.M)
    _delete_weights(folder)
    return {**found, "plan": plan[1] if plan else None}


def _figures(run: Path) -> dict[str, Any]:
    """Losses, speed and memory of a run, from its metrics.jsonl."""
    records = _records(run)
    train = [record for record in records if record["kind"] == "train"]
    rates = [record["images_per_second"] for record in train if record["step"] > WARMUP_STEPS]
    memory = next((record for record in reversed(records) if record["kind"] == "memory"), {})
    psnr = [record["psnr"] for record in records if record["kind"] == "validation" and record.get("psnr")]
    predicted, reserved = memory.get("predicted_peak_gib"), memory.get("memory_reserved_gib")
    return {
        "steps": max((record["step"] for record in train), default=0),
        "images_per_second": round(median(rates), 3) if rates else None,
        "predicted_gib": round(predicted, 3) if predicted else None,
        "reserved_gib": round(reserved, 3) if reserved else None,
        "reserved_over_predicted": round(reserved / predicted, 4) if reserved and predicted else None,
        "retries": memory.get("memory_retries"),
        "first_loss": train[0]["loss"] if train else None,
        "last_loss": train[-1]["loss"] if train else None,
        "psnr": psnr[-1] if psnr else None,
    }


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def _delete_weights(folder: Path) -> None:
    """Checkpoints of 1.3 GB that nothing needs."""
    for path in folder.rglob("*.pt"):
        path.unlink()


PARTS: dict[str, Callable[[Machine, Path], list[Case]]] = {
    "check": check_cases,
    "tests": test_cases,
    "correctness": correctness_cases,
    "profiles": profile_cases,
    "speed": speed_cases,
    "comparison": comparison_cases,
    "training": training_cases,
}
