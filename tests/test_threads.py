"""Waiting OpenMP threads soon sleep in every script, unless the user has chosen otherwise."""

import os
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT

PROGRAM = """
import os, sys
from vae.system.script import run_script

def main(argv):
    assert "torch" not in sys.modules  # OpenMP reads the setting when PyTorch is imported
    if argv:
        import torch
    print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
    return 0

run_script("test", main)
"""


def run_program(*words, **settings):
    environ = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(
        command, cwd=ROOT, env=environ | settings, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "PASSIVE 50000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7"),
    ],
)
def test_settings_of_a_script(settings, expected):
    done = run_program(**settings)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP prints its settings")
def test_openmp_reads_them():
    printed = run_program("with_torch", OMP_DISPLAY_ENV="VERBOSE").stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in printed
    assert "GOMP_SPINCOUNT = '50000'" in printed
