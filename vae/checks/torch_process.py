"""Imports PyTorch and computes with it in a child process, so that a crash or hang is a result of the check.

`start` starts the process and `parse` turns its output into facts. `main` runs inside it. Whenever it learns
something or begins something, it prints one line: all facts so far, as JSON. The last complete line counts.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from vae.checks.facts import CudaDevice, LoadedTorch
from vae.system.child_process import ChildProcess, FinishedProcess
from vae.system.files import parse_json

FACTS = '{"facts": '  # how our lines begin; libraries may print other lines


def start(project: Path) -> ChildProcess:
    """Start the process; raises OSError if it cannot start."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from vae.checks.torch_process import main; main()"
    command = [sys.executable, "-X", "utf8", "-c", code, str(project)]
    return ChildProcess(command, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, cwd=str(project))


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
        _compute(reporter)
    reporter.add(unfinished=None)


class _Reporter:
    """Collects facts; prints all of them whenever one is added."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}

    def add(self, **facts: object) -> None:
        """`unfinished` names what is going to run next, so that a crash can be attributed."""
        self._facts |= facts
        print(FACTS + json.dumps(self._facts) + "}", flush=True)


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


def _compute(reporter: _Reporter) -> None:
    """A convolution and its gradient, whose values are known: 9 weights of 1 in each of 8 channels."""
    reporter.add(unfinished="computing")
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        images = torch.ones(1, 8, 8, 8, device=device, requires_grad=True)
        weight = torch.ones(8, 8, 3, 3, device=device)
        torch.nn.functional.conv2d(images, weight, padding=1).sum().backward()
        assert images.grad is not None
        largest = images.grad.max().item()
        if largest != 72:
            raise ArithmeticError(f"the gradient of a convolution is {largest:g}, not 72")
    except Exception as error:
        reporter.add(compute_error=_short(error))
