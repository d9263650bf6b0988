"""Installed packages, read from the files of this environment and from files written by the tests."""

import sys

import pytest
import torch
import torchvision

from tests.harness.runs import ROOT
from vae.checks.packages import gather_torch_files, installed, read_requirements, specifier_in


def test_read_requirements():
    found = dict(read_requirements(ROOT))
    assert found["torch"].startswith(">=2.10")
    assert "!=2.13.0+cpu" in found["torch"]
    assert found["Pillow"] == (">=13.0" if sys.version_info >= (3, 11) else ">=12.3")  # markers are read
    assert set(found) >= {"torchvision", "lpips", "numpy", "tqdm", "tensorboard", "safetensors"}


def test_torch_files_match_the_modules():
    files = gather_torch_files()
    assert files.version == torch.__version__
    assert files.cuda == torch.version.cuda
    assert files.hip == torch.version.hip
    assert files.vision_version == torchvision.__version__


@pytest.mark.parametrize(
    ("line", "specifier"),
    [
        ('triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"', "~=3.9.0"),
        ("triton==3.6.0", "==3.6.0"),
        ("pytorch-triton==3.2.0+git1234", "==3.2.0+git1234"),
        ("triton (>=3.0,<4)", ">=3.0,<4"),
        ("triton-kernels==1.0", None),
        ("opt-einsum>=3.3; extra == 'triton'", None),
        ("triton==3.0; extra == 'fast'", None),
        ("triton", None),
    ],
)
def test_specifier_in_metadata(line, specifier):
    assert specifier_in(["numpy", line], "triton") == specifier


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
