"""check_compatibility.py in a process of its own, with any Python and environment variables."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.runs import ROOT

SCRIPT = str(ROOT / "check_compatibility.py")
POSIX = pytest.mark.skipif(os.name == "nt", reason="scripts replace programs in these tests")


def run_check(python: str, *words: str, cwd: Path = ROOT, script: str = SCRIPT, **env: str | None):
    """Run the script with `python`; keywords set environment variables, None removes one. Output is bytes."""
    whole = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    clean = {name: value for name, value in whole.items() if value is not None}
    return subprocess.run([python, script, *words], cwd=cwd, capture_output=True, env=clean, timeout=300)


def checks_of(output: bytes | str) -> dict[str, dict]:
    """The checks of a JSON report by their ids."""
    return {check["id"]: check for check in json.loads(output)["checks"]}
