"""Waiting OpenMP threads sleep in every script, unless the user has chosen otherwise."""

import os
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT

PROGRAM = """
import os, sys
from vae.script import run_script

def main(argv):
    assert "torch" not in sys.modules  # OpenMP reads the setting when PyTorch is imported
    import torch
    print(os.environ["OMP_WAIT_POLICY"])
    return 0

run_script("test", main)
"""


@pytest.mark.parametrize(("setting", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_setting_of_a_script(setting, expected):
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if setting:
        environ["OMP_WAIT_POLICY"] = setting
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP prints its settings")
def test_openmp_reads_it():
    environ = {**os.environ, "OMP_DISPLAY_ENV": "TRUE"}
    environ.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
