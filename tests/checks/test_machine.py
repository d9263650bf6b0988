"""Facts about this machine, and names that systems report."""

import sys

import pytest

from tests.harness.runs import ROOT
from vae.checks.machine import find_compiler, gather_host, gather_python, wsl_version


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("5.15.153.1-microsoft-standard-WSL2", 2),
        ("4.19.128-microsoft-standard", 2),
        ("4.4.0-19041-Microsoft", 1),
        ("6.8.0-49-generic", 0),
        ("11", 0),
    ],
)
def test_wsl_version(release, version):
    assert wsl_version(release) == version


def test_host_facts_are_consistent():
    host = gather_host()
    assert 1 <= host.cores_usable <= host.cores
    assert 0 < host.memory_free <= host.memory_total
    assert host.wsl in (0, 1, 2)


def test_python_facts_match_this_python():
    python = gather_python(ROOT)
    assert python.version == tuple(sys.version_info[:3])
    assert python.bits == 64


def test_project_environment_is_found(tmp_path):
    assert gather_python(tmp_path).project_python is None
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text("")
    assert gather_python(tmp_path).project_python == ".venv/bin/python"


def test_cc_selects_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() is None
    for name in ("clang", "my-cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_compiler() == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "my-cc")
    assert find_compiler() == str(tmp_path / "my-cc")
