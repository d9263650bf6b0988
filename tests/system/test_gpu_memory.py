"""The environment variables for a card's memory: chosen by system, and a user's own settings win."""

import os
import platform
import re
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT
from vae.system.gpu_memory import (
    ALLOCATOR_VARIABLES,
    FREED_BLOCKS,
    GROWING_SEGMENTS,
    allocator_setting,
    set_gpu_memory_variables,
)


@pytest.mark.parametrize(
    ("system", "release", "expected"),
    [
        ("Linux", "6.8.0-49-generic", GROWING_SEGMENTS),
        ("Linux", "5.15.153.1-microsoft-standard-WSL2", FREED_BLOCKS),
        ("Windows", "11", FREED_BLOCKS),
    ],
)
def test_allocator_of_a_system(monkeypatch, system, release, expected):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_gpu_memory_variables()
    assert {os.environ[name] for name in ALLOCATOR_VARIABLES} == {expected}
    assert allocator_setting() == expected


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_own_settings_win(monkeypatch, name):
    for other in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    set_gpu_memory_variables()
    assert {other for other in ALLOCATOR_VARIABLES if other in os.environ} == {name}
    assert allocator_setting() == "max_split_size_mb:64"


def test_scripts_set_them_before_pytorch_is_imported():
    program = """
import sys
from vae.system.script import run_script
from vae.system.gpu_memory import allocator_setting

def main(argv):
    assert "torch" not in sys.modules
    print(allocator_setting())
    return 0

run_script("test", main)
"""
    environ = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (GROWING_SEGMENTS, FREED_BLOCKS)


@pytest.mark.parametrize("script", sorted(ROOT.glob("*.py")), ids=lambda path: path.name)
def test_every_script_begins_with_the_function_that_sets_them(script):
    source = script.read_text(encoding="utf-8")
    assert "    run_script(" in source
    assert not re.search("^(import|from) torch", source, re.M)
