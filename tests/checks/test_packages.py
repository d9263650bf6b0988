"""Installed packages, read from files; versions are compared as pip does: `packaging` is the reference."""

import itertools
import re
import sys

import pytest
import torch
import torchvision
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.harness.runs import ROOT
from vae.checks.packages import build, gather_torch_files, installed, read_requirements, release, satisfies

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
    ">2.13.0,<=3",
    "~=2.10",
    "~=2.13.0",
    "",
)


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


def test_missing_package():
    assert installed("no-such-package-of-ours") is None


def test_version_file_is_read_without_executing_it(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\n"
        "hip: Optional[str] = None\nraise SystemExit\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    files = gather_torch_files()
    assert (files.version, files.cuda, files.hip) == ("2.11.0+cu128", "12.8", None)


@pytest.mark.parametrize(("version", "specifier"), list(itertools.product(VERSIONS, SPECIFIERS)))
def test_satisfies_matches_packaging(version, specifier):
    assert satisfies(version, specifier) == SpecifierSet(specifier).contains(Version(version))


def test_parts_of_a_version():
    assert release("2.15.0a1+cu132") == (2, 15, 0)
    assert release("unknown") == ()
    assert build("2.15.0+cu132") == "cu132"
    assert build("2.15.0") == ""
