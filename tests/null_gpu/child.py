"""Runs Python programs on the null GPU, for tests."""

import subprocess
import sys
from typing import Any

import pytest

from tests.harness.runs import ROOT
from tests.null_gpu.build import environment, why_not
from vae.system.gpus import ALLOCATOR_VARIABLES

_REASON = why_not()
NEEDS_NULL_GPU = [pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]


# A thread of PyTorch may end a process that is being taken apart with "terminate called".
END = "\nfrom vae.system.script import end_process\nend_process(0)\n"


def run_on_null_gpu(*words: str, code: int = 0, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words; `settings` are those of `environment`, and variables in capitals."""
    variables = {name: settings.pop(name) for name in [*settings] if name.isupper()}
    child = {**environment(**settings), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    for name in ALLOCATOR_VARIABLES:  # of this machine's user
        if name not in variables:
            child.pop(name, None)
    if words[0] == "-c":
        words = ("-c", words[1] + END, *words[2:])
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=child, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done
