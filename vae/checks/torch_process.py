"""Imports PyTorch and computes with it in a child process, so that a crash or hang is a result of the check.

`main` runs inside it and prints a line of JSON for each new fact, so that those before a crash are known.
"""

import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vae.checks.facts import TIME_LIMIT, Card, LoadedTorch
from vae.system.child_process import ChildProcess, FinishedProcess
from vae.system.host import MIB
from vae.system.script import system_error_line

FACTS = '{"facts": '  # our lines begin with it; libraries may print other lines
TIMEOUT_SECONDS = 300.0  # a first import from a cold disk under a virus scanner


def load(project: Path) -> LoadedTorch:
    """Let PyTorch report and compute in a process of its own."""
    if importlib.util.find_spec("torch") is None:
        return LoadedTorch(installed=False)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from vae.checks.torch_process import main; main()"
    command = [sys.executable, "-X", "utf8", "-c", code, str(project)]
    try:
        process = ChildProcess(command, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, cwd=str(project))
    except OSError as error:
        return LoadedTorch(error=f"a second Python cannot be started: {error.strerror or error}")
    return parse(process.finish(TIMEOUT_SECONDS))


def parse(process: FinishedProcess) -> LoadedTorch:
    """The facts in the output of the process, also if it ended early."""
    facts: dict[str, Any] = {"unfinished": "starting Python"}
    for line in process.out.splitlines():
        if line.startswith(FACTS):
            try:
                facts |= json.loads(line)["facts"]
            except ValueError:  # the process ended in the middle of the line
                continue
    devices = facts.pop("devices", [])
    return LoadedTorch(
        arch_list=tuple(facts.pop("arch_list", ())),
        devices=tuple(Card(name, tuple(capability), mib) for name, capability, mib in devices),
        ended=_how_it_ended(process) if facts["unfinished"] else None,
        **facts,
    )


def _how_it_ended(process: FinishedProcess) -> str:
    if process.code is None:
        return TIME_LIMIT
    last = (process.err.strip().splitlines() or [""])[-1]
    how = f"killed by signal {-process.code}" if process.code < 0 else f"ended with code {process.code}"
    return f"{how}: {last}" if last else how


# --- inside the process ----------------------------------------------------------------------------------


def main() -> None:
    """Print each new fact."""
    for new in _facts():
        print(FACTS + json.dumps(new) + "}", flush=True)


def _facts() -> Iterator[dict[str, Any]]:
    """Yield what PyTorch reports and computes; `unfinished` is the part that runs next, or has crashed."""
    # A damaged installation raises anything: ImportError, OSError, RuntimeError. So do CUDA and compilers.
    yield {"unfinished": "loading torch"}
    try:
        import torch
    except Exception as error:
        yield {"error": _short(error), "unfinished": None}
        return
    arch_list = torch.cuda.get_arch_list() if torch.version.cuda else []
    yield {"arch_list": arch_list, "unfinished": "loading torchvision"}
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        yield {"vision_error": _short(error)}
    if torch.version.cuda or torch.version.hip:
        yield {"unfinished": "looking for cards"}
        yield _cards()
    yield {"unfinished": "computing"}
    try:
        _compute()
    except Exception as error:
        yield {"compute_error": _short(error)}
    yield {"unfinished": None}


def _short(error: BaseException) -> str:
    """Type and first line of an error: messages of CUDA and the compiler can be pages long."""
    text = system_error_line(error) if isinstance(error, OSError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _cards() -> dict[str, Any]:
    """The cards, or why there is none."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        message = str(caught[-1].message).splitlines()[0] if caught else None
    if not available:
        try:
            torch.cuda.init()
        except Exception as error:
            message = _short(error)
        return {"cuda_message": message}
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {"devices": [(card.name, (card.major, card.minor), card.total_memory // MIB) for card in cards]}


def _compute() -> None:
    """A convolution and its gradient, whose values are known: 9 weights of 1 in each of 8 channels."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.ones(1, 8, 8, 8, device=device, requires_grad=True)
    weight = torch.ones(8, 8, 3, 3, device=device)
    torch.nn.functional.conv2d(images, weight, padding=1).sum().backward()
    assert images.grad is not None
    largest = images.grad.max().item()
    if largest != 72:
        raise ArithmeticError(f"the gradient of a convolution is {largest:g}, not 72")
