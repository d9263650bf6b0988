"""Imports PyTorch and runs the test computations in a child process, so that a crash or hang is a finding.

`start` starts the process and `parse` turns its output into facts. `main` runs inside it and prints one JSON
object per line. It announces each computation before it starts, so that a crash can be attributed.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from vae.checks.child_process import ChildProcess, FinishedProcess
from vae.checks.facts import CudaDevice, KernelRun, LoadedTorch
from vae.system.files import parse_json

FACT = '{"fact": '  # how our lines begin; libraries may print other lines
SLOW_KERNELS = ("compile",)  # skipped by --quick


def start(project: Path, quick: bool) -> ChildProcess:
    """Start the process; raises OSError if it cannot start."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from vae.checks.torch_process import main; main()"
    command = [sys.executable, "-X", "utf8", "-c", code, str(project), "quick" if quick else "whole"]
    # One compile process: a pool takes longer to start than the one small kernel takes to compile.
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return ChildProcess(command, env=env, cwd=str(project))


def parse(outcome: FinishedProcess) -> LoadedTorch:
    """The facts in the output of the process, also if it ended early."""
    facts: dict[str, Any] = {}
    kernels: list[KernelRun] = []
    running: str | None = "starting Python"
    for line in outcome.out.splitlines():
        if not line.startswith(FACT):
            continue
        try:
            fact = parse_json(line)
        except ValueError:  # the process ended in the middle of the line
            continue
        kind = fact.pop("fact")
        if kind == "begin":
            running = fact["what"]
        elif kind == "kernel":
            kernels.append(KernelRun(**fact))
        elif kind == "end":
            running = None
        else:
            facts |= fact
    devices = tuple(
        CudaDevice(name, (major, minor), total) for name, (major, minor), total in facts.pop("devices", [])
    )
    arch_list = tuple(facts.pop("arch_list", ()))
    ended = _how_it_ended(outcome) if running else None
    return LoadedTorch(
        **facts, arch_list=arch_list, devices=devices, kernels=tuple(kernels), unfinished=running, ended=ended
    )


def _how_it_ended(outcome: FinishedProcess) -> str:
    if outcome.code is None:
        return "it exceeded the time limit"
    last = (outcome.err.strip().splitlines() or [""])[-1]
    how = f"killed by signal {-outcome.code}" if outcome.code < 0 else f"ended with code {outcome.code}"
    return f"{how}: {last}" if last else how


# --- inside the process ----------------------------------------------------------------------------------


def main() -> None:
    """Print what PyTorch reports and computes."""
    if _import_torch():
        _look_for_cards()
        _report_cpu_precision()
        _run_kernels(quick=sys.argv[2] == "quick")
    _emit("end")


def _emit(kind: str, **values: object) -> None:
    print(json.dumps({"fact": kind, **values}), flush=True)


def _begin(what: str) -> None:
    _emit("begin", what=what)


def _short(error: BaseException) -> str:
    """Type and first line of an error: messages of CUDA and the compiler can be pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _import_torch() -> bool:
    _begin("loading torch")
    try:
        import torch
    except Exception as error:  # a damaged installation raises anything: ImportError, OSError, RuntimeError
        _emit("loaded", error=_short(error))
        return False
    _emit("loaded", arch_list=torch.cuda.get_arch_list() if torch.version.cuda else [])
    _begin("loading torchvision")
    try:
        import torchvision  # noqa: F401
    except Exception as error:  # likewise: RuntimeError if it was built for another torch
        _emit("loaded", vision_error=_short(error))
    return True


def _report_cpu_precision() -> None:
    try:
        import torch

        from vae.device import precision_support

        _emit("loaded", cpu_bf16=precision_support(torch.device("cpu")).bf16)
    except Exception:  # a damaged installation raises anything; the other checks report it
        return


def _look_for_cards() -> None:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return
    _begin("looking for cards")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        message = str(caught[-1].message).splitlines()[0] if caught else None
    if not available:
        try:
            torch.cuda.init()
        except Exception as error:  # RuntimeError or AssertionError, depending on the version
            message = _short(error)
        _emit("cuda", cuda_available=False, cuda_message=message)
        return
    devices = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        devices.append((card.name, (card.major, card.minor), card.total_memory))
    _emit("cuda", cuda_available=True, devices=devices)


def _run_kernels(quick: bool) -> None:
    import torch

    _begin("loading the model")
    try:
        from vae.checks.kernels import KERNELS, applies
        from vae.device import pick_device

        device = pick_device("auto")
        if device.type == "cuda":
            kept = torch.empty(1, device=device)
            growing = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
            _emit("cuda", growing_segments=growing)
            del kept
        # The sizes are too small for several threads: on a busy machine, waiting took 25 times as long.
        torch.set_num_threads(1)
    except (
        Exception
    ) as error:  # a missing or damaged package has its own check; this explains the skipped rest
        _emit("kernel", name="import", error=_short(error))
        return
    for name, run in KERNELS.items():
        if (quick and name in SLOW_KERNELS) or not applies(name, device):
            continue
        _begin(f"kernel {name}")
        start_time = time.perf_counter()
        result: dict[str, object]
        try:
            difference, tolerance = run(device)
            result = {"difference": difference, "tolerance": tolerance}
        except Exception as error:  # CUDA, cuDNN and compilers each raise their own types
            result = {"error": _short(error)}
        _emit("kernel", name=name, seconds=round(time.perf_counter() - start_time, 3), **result)
