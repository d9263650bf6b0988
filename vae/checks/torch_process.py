"""Imports PyTorch and runs the test computations in a child process, so that a crash or hang is a finding.

`start` starts the process and `parse` turns its output into facts. `main` runs inside it. Whenever it learns
something or begins something, it prints one line: all facts so far, as JSON. The last complete line counts.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from vae.checks.facts import CudaDevice, KernelRun, LoadedTorch
from vae.system.child_process import ChildProcess, FinishedProcess
from vae.system.files import parse_json

FACTS = '{"facts": '  # how our lines begin; libraries may print other lines


def start(project: Path, quick: bool) -> ChildProcess:
    """Start the process; raises OSError if it cannot start."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from vae.checks.torch_process import main; main()"
    command = [sys.executable, "-X", "utf8", "-c", code, str(project), "quick" if quick else "whole"]
    # One compile process: a pool takes longer to start than the one small kernel takes to compile.
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return ChildProcess(command, env=env, cwd=str(project))


def parse(process: FinishedProcess) -> LoadedTorch:
    """The facts in the output of the process, also if it ended early."""
    facts: dict[str, Any] = {"unfinished": "starting Python"}
    for line in process.out.splitlines():
        if line.startswith(FACTS):
            try:
                facts = parse_json(line)["facts"]
            except ValueError:  # the process ended in the middle of the line
                continue
    devices = facts.pop("devices", [])
    return LoadedTorch(
        arch_list=tuple(facts.pop("arch_list", ())),
        devices=tuple(CudaDevice(name, (major, minor), total) for name, (major, minor), total in devices),
        kernels=tuple(KernelRun(**run) for run in facts.pop("kernels", [])),
        ended=_how_it_ended(process) if facts["unfinished"] else None,
        **facts,
    )


def _how_it_ended(process: FinishedProcess) -> str:
    if process.code is None:
        return "it exceeded the time limit"
    last = (process.err.strip().splitlines() or [""])[-1]
    how = f"killed by signal {-process.code}" if process.code < 0 else f"ended with code {process.code}"
    return f"{how}: {last}" if last else how


# --- inside the process ----------------------------------------------------------------------------------


def main() -> None:
    """Print what PyTorch reports and computes."""
    reporter = _Reporter()
    if _import_torch(reporter):
        _look_for_cards(reporter)
        _run_kernels(reporter, quick=sys.argv[2] == "quick")
    reporter.add(unfinished=None)


class _Reporter:
    """Collects facts; prints all of them whenever one is added."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {"kernels": []}

    def add(self, **facts: object) -> None:
        """`unfinished` names what is going to run next, so that a crash can be attributed."""
        self._facts |= facts
        print(FACTS + json.dumps(self._facts) + "}", flush=True)

    def add_kernel(self, name: str, **values: object) -> None:
        self._facts["kernels"].append({"name": name, **values})


def _short(error: BaseException) -> str:
    """Type and first line of an error: messages of CUDA and the compiler can be pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


# A damaged installation raises anything: ImportError, OSError, RuntimeError. So do CUDA, cuDNN and compilers.


def _import_torch(reporter: _Reporter) -> bool:
    reporter.add(unfinished="loading torch")
    try:
        import torch
    except Exception as error:
        reporter.add(error=_short(error))
        return False
    arch_list = torch.cuda.get_arch_list() if torch.version.cuda else []
    reporter.add(arch_list=arch_list, unfinished="loading torchvision")
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        reporter.add(vision_error=_short(error))
    return True


def _look_for_cards(reporter: _Reporter) -> None:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return
    reporter.add(unfinished="looking for cards")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        message = str(caught[-1].message).splitlines()[0] if caught else None
    if not available:
        try:
            torch.cuda.init()
        except Exception as error:
            message = _short(error)
        reporter.add(cuda_message=message)
        return
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [(card.name, (card.major, card.minor), card.total_memory) for card in cards]
    reporter.add(devices=devices)


def _run_kernels(reporter: _Reporter, quick: bool) -> None:
    import torch

    reporter.add(unfinished="loading the model")
    try:
        from vae.checks.kernels import KERNELS, applies
        from vae.device import pick_device

        device = pick_device("auto")
        if device.type == "cuda":
            kept = torch.empty(1, device=device)
            growing = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
            reporter.add(growing_segments=growing)
            del kept
        # The sizes are too small for several threads: on a busy machine, waiting took 25 times as long.
        torch.set_num_threads(1)
    except Exception as error:  # a missing package has its own check; this explains the skipped rest
        reporter.add_kernel("import", error=_short(error))
        return
    for name, run in KERNELS.items():
        if (quick and name == "compile") or not applies(name, device):
            continue
        reporter.add(unfinished=f"kernel {name}")
        start_time = time.perf_counter()
        try:
            difference, tolerance = run(device)
            result: dict[str, object] = {"difference": difference, "tolerance": tolerance}
        except Exception as error:
            result = {"error": _short(error)}
        reporter.add_kernel(name, seconds=round(time.perf_counter() - start_time, 3), **result)
