"""Facts about this machine: folders, mounts, the cache of weights, nvidia-smi and packages."""

import itertools
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torchvision
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.harness.machines import DESKTOP, changed, verdict
from tests.harness.runs import ROOT
from vae.checks.facts import Card
from vae.checks.machine import (
    SMI_FIELDS,
    gather_folder,
    gather_torch_files,
    parse_nvidia_smi,
    project_python,
    query_nvidia_smi,
    read_requirements,
    satisfies,
    vgg_path,
)
from vae.checks.table import SKIP
from vae.system.host import find_compiler


def test_project_environment_is_found(tmp_path):
    assert project_python(tmp_path) is None
    python = Path(".venv", "Scripts/python.exe" if os.name == "nt" else "bin/python")
    (tmp_path / python).parent.mkdir(parents=True)
    (tmp_path / python).write_text("")
    assert project_python(tmp_path) == str(python)


def test_cc_selects_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() is None
    suffix = ".EXE" if os.name == "nt" else ""
    for name in ("clang", "my-cc"):
        (tmp_path / f"{name}{suffix}").write_text("#!/bin/sh\n")
        (tmp_path / f"{name}{suffix}").chmod(0o755)
    assert Path(find_compiler()) == tmp_path / f"clang{suffix}"
    monkeypatch.setenv("CC", "my-cc")
    assert Path(find_compiler()) == tmp_path / f"my-cc{suffix}"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has /dev/shm")
def test_file_system_of_a_folder_is_that_of_its_mount(tmp_path, monkeypatch):
    inside = "/dev/shm/no such folder/x"
    assert gather_folder("--output_dir", inside, given=True, writes=True).file_system == "tmpfs"
    monkeypatch.setenv("PATH", str(tmp_path))  # without findmnt
    assert gather_folder("--output_dir", inside, given=True, writes=True).file_system is None


def test_folder_that_will_be_created(tmp_path):
    found = gather_folder("--output_dir", str(tmp_path / "a b'ü" / "c"), given=True, writes=True)
    assert not found.exists
    assert found.nearest == str(tmp_path)
    assert found.free > 0
    assert found.problem is None
    assert list(tmp_path.iterdir()) == []  # the check creates nothing


def test_remote_store_is_no_missing_folder():
    """It is skipped, and its password is not in the report."""
    address = "s3://me:5ecret@bucket/dataset.json"
    found = gather_folder("--data_path", address, given=True, writes=False)
    facts = changed(DESKTOP, folders=(DESKTOP.folders[0], found))
    check = verdict(facts, "disk.images")
    assert (check.status, "s3://bucket/dataset.json" in check.found) == (SKIP, True)
    assert "5ecret" not in str((found, check))


ANSWER = "0, NVIDIA GeForce RTX 5090, 580.95.05, 32607, 12.0\n"


def test_parse_cards_after_a_warning():
    second = "1, NVIDIA GeForce RTX 4090 Laptop GPU, 580.95.05, [N/A], [Unknown Error]\n"
    smi = parse_nvidia_smi(0, f"Warning: infoROM is corrupted at gpu 0\n{ANSWER}{second}", "")
    assert (smi.status, smi.driver) == ("answered", "580.95.05")
    assert smi.cards == (
        Card("NVIDIA GeForce RTX 5090", (12, 0), 32607),
        Card("NVIDIA GeForce RTX 4090 Laptop GPU"),
    )
    assert (
        parse_nvidia_smi(0, ANSWER.replace("RTX", "RTX, 4000", 1), "").status == "failed"
    )  # too many fields


@pytest.mark.parametrize(
    ("code", "out", "status"),
    [
        (0, "No devices were found\n", "answered"),
        (6, "No devices were found\n", "answered"),
        (0, "", "answered"),
        (18, "Failed to initialize NVML: Driver/library version mismatch\n", "failed"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "failed"),
        (255, "Failed to initialize NVML: Unknown Error\n", "failed"),  # a container that lost its card
        (139, "", "failed"),
    ],
)
def test_output_without_cards(code, out, status):
    smi = parse_nvidia_smi(code, out, "")
    assert (smi.status, smi.cards) == (status, ())
    if out:
        assert out.strip() == smi.message
    elif status == "failed":
        assert "139" in smi.message


# --- the program itself, on PATH ------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Write a Python program as nvidia-smi into the only folder on PATH."""
    if os.name == "nt":
        pytest.skip("a program of Windows is no script")
    folder = tmp_path / "a b'ü"
    folder.mkdir()

    def write(code: str) -> None:
        file = folder / "nvidia-smi"
        file.write_text(f"#!{sys.executable} -S\n{code}\n", encoding="utf-8")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    return write


def test_missing_program(program):
    assert query_nvidia_smi(60).status == "missing"


def test_query_requests_every_field(program):
    program(f"import sys\nassert sys.argv[1] == '--query-gpu={','.join(SMI_FIELDS)}'\nprint({ANSWER!r})")
    assert query_nvidia_smi(60).cards[0].memory_mib == 32607


def test_time_limit_with_a_child_that_keeps_the_output_open(program):
    program(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        "\ntime.sleep(60)"
    )
    begun = time.monotonic()
    smi = query_nvidia_smi(0.3)
    assert (smi.status, smi.message) == ("hanging", "no answer in 0.3 s")
    assert time.monotonic() - begun < 30  # far below the minute it would sleep


VERSIONS = (
    "2.9.1",
    "2.10",
    "2.10.0",
    "2.13.0+cpu",
    "2.13.0+cu130",
    "2.13.1",
    "3.0.0",
    "13.0.0",
    "3.8.1.post2",
)
SPECIFIERS = (
    ">=2.10",
    ">=2.10,!=2.13.0+cpu",
    "==2.13.*",
    "!=2.13.*",
    "==2.10",
    "<3,>=2.9",
    ">=13",
    "<=2.13.0",
)
SPECIFIERS += (">2.13.0,<=3", "~=2.10", "~=2.13.0", "")


def test_read_requirements():
    found = dict(read_requirements(ROOT))
    assert found["torch"].startswith(">=2.10")
    assert "!=2.13.0+cpu" in found["torch"]
    assert found["Pillow"] == (">=13.0" if sys.version_info >= (3, 11) else ">=12.3")  # markers are read
    clause = r"(~=|[=!<>]=|[<>])[^,<>=!~]+"
    assert all(re.fullmatch(f"{clause}(,{clause})*", specifier) for specifier in found.values())
    assert set(found) >= {"torchvision", "lpips", "numpy", "tqdm", "tensorboard", "safetensors"}


def test_torch_files_match_the_modules():
    files = gather_torch_files()
    assert files.version == torch.__version__
    assert files.cuda == torch.version.cuda
    assert files.hip == torch.version.hip
    assert files.vision_version == torchvision.__version__


def test_version_file_is_read_without_executing_it(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\n"
        "hip: Optional[str] = None\nraise SystemExit\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    files = gather_torch_files()
    assert (files.version, files.cuda, files.hip) == ("2.11.0+cu128", "12.8", None)


def test_satisfies_matches_packaging():
    for version, specifier in itertools.product(VERSIONS, SPECIFIERS):
        expected = SpecifierSet(specifier).contains(Version(version))
        assert satisfies(version, specifier) == expected, (version, specifier)


def test_weights_are_in_the_folder_of_torch_hub(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_HOME", raising=False)
    for name in ("XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert str(vgg_path().parent) == os.path.join(torch.hub.get_dir(), "checkpoints")
