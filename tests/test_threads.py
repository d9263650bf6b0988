"""Waiting OpenMP threads soon sleep in every script, unless the user has chosen otherwise."""

import os
import sys

import pytest

from tests.harness.runs import run_script
from vae.system.script import limit_spinning

PROGRAM = """
import sys
from vae.system.script import run_script

def main(argv):
    assert "torch" not in sys.modules  # OpenMP reads the setting when PyTorch is imported
    import torch
    return 0

run_script("test", main)
"""
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def test_a_setting_of_the_user_wins(monkeypatch):
    for given, expected in (
        ({}, ("PASSIVE", "50000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"GOMP_SPINCOUNT": "7"}, (None, "7")),
    ):
        monkeypatch.setattr(os, "environ", dict(given))
        limit_spinning()
        assert tuple(map(os.environ.get, NAMES)) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP prints its settings")
def test_openmp_reads_them(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    printed = run_script("-c", PROGRAM, env={"OMP_DISPLAY_ENV": "VERBOSE"}).stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in printed
    assert "GOMP_SPINCOUNT = '50000'" in printed
