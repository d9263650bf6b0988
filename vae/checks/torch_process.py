"""Loads PyTorch and runs the kernels in a process of its own: what crashes or hangs there is a finding.

`start` begins it, `read` turns what it wrote into facts. What runs inside is `main`: one JSON object per
line, each computation announced before it begins, so that the one that ended the process is known.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

from vae.checks.children import Child, Outcome
from vae.checks.facts import CudaDevice, KernelRun, LoadedTorch

FACT = '{"fact": '  # how our lines begin; libraries may print lines of their own
SLOW_KERNELS = ("compile",)  # left out by --quick


def start(project: Path, quick: bool) -> Child:
    """Begin the process; raises OSError where it cannot be started."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from vae.checks.torch_process import main; main()"
    command = [sys.executable, "-X", "utf8", "-c", code, str(project), "quick" if quick else "whole"]
    # One compiling process: a pool of them takes longer to start than the one small kernel to compile.
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return Child(command, env=env, cwd=str(project))


def read(outcome: Outcome) -> LoadedTorch:
    """The facts in what the process wrote, as far as it came."""
    facts: dict = {}
    kernels, running = [], "starting Python"
    for line in outcome.out.splitlines():
        if not line.startswith(FACT):
            continue
        try:
            fact = json.loads(line)
        except ValueError:  # the process ended in the middle of it
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
        CudaDevice(name, tuple(capability), total) for name, capability, total in facts.pop("devices", [])
    )
    arch_list = tuple(facts.pop("arch_list", ()))
    ended = _how_it_ended(outcome) if running else None
    return LoadedTorch(
        **facts, arch_list=arch_list, devices=devices, kernels=tuple(kernels), unfinished=running, ended=ended
    )


def _how_it_ended(outcome: Outcome) -> str:
    if outcome.code is None:
        return "it did not end in time"
    last = (outcome.err.strip().splitlines() or [""])[-1]
    how = f"killed by signal {-outcome.code}" if outcome.code < 0 else f"ended with code {outcome.code}"
    return f"{how}: {last}" if last else how


# --- inside the process ----------------------------------------------------------------------------------


def main() -> None:
    """Write down what PyTorch says and computes."""
    if _load():
        _look_at_cuda()
        _run_kernels(quick=sys.argv[2] == "quick")
    _tell("end")


def _tell(kind: str, **values) -> None:
    print(json.dumps({"fact": kind, **values}), flush=True)


def _begin(what: str) -> None:
    _tell("begin", what=what)


def _short(error: BaseException) -> str:
    """Kind and first line of an error, without the pages that CUDA's and the compiler's messages have."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _load() -> bool:
    _begin("loading torch")
    try:
        import torch
    except Exception as error:  # a damaged installation raises anything: ImportError, OSError, RuntimeError
        _tell("loaded", error=_short(error))
        return False
    _tell("loaded", arch_list=torch.cuda.get_arch_list() if torch.version.cuda else [])
    _begin("loading torchvision")
    try:
        import torchvision  # noqa: F401
    except Exception as error:  # the same: RuntimeError where it was built for another torch
        _tell("loaded", vision_error=_short(error))
    return True


def _look_at_cuda() -> None:
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
        except Exception as error:  # RuntimeError or AssertionError, as the version likes
            message = _short(error)
        _tell("cuda", cuda_available=False, cuda_message=message)
        return
    devices = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        devices.append((card.name, (card.major, card.minor), card.total_memory))
    _tell("cuda", cuda_available=True, devices=devices)


def _run_kernels(quick: bool) -> None:
    import torch

    _begin("loading the model")
    try:
        from vae.checks.kernels import KERNELS

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Sizes are too small to share: on a busy machine, waiting for each other took 25 times as long.
        torch.set_num_threads(1)
    except Exception as error:  # what is missing or damaged has its own check; here it is why nothing ran
        _tell("kernel", name="import", error=_short(error))
        return
    for name, run in KERNELS.items():
        if quick and name in SLOW_KERNELS:
            continue
        _begin(f"kernel {name}")
        begun = time.perf_counter()
        try:
            difference, tolerance = run(device)
            result = {"difference": difference, "tolerance": tolerance}
        except Exception as error:  # CUDA, cuDNN and compilers each raise their own kinds
            result = {"error": _short(error)}
        _tell("kernel", name=name, seconds=round(time.perf_counter() - begun, 3), **result)
