"""Run a module whose Triton kernels run in Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from importlib.metadata import version

import numpy
import pytest

from tests.harness.runs import ROOT


def interpreted(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m module`; the test is skipped, with the reason, if the interpreter cannot run here."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    of_triton, of_numpy = version("triton"), numpy.__version__
    if _release(of_triton) < (3, 7) and _release(of_numpy) >= (2, 4):
        reason = f"Triton {of_triton}'s interpreter fails with numpy {of_numpy}: pip install 'numpy<2.4'"
        pytest.skip(f"{reason}, as the set-up does")
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
