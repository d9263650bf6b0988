"""Installed packages, read from the files of this environment and from files written by the tests."""

import sys

import torch
import torchvision

from tests.harness.runs import ROOT
from vae.checks.packages import gather_torch_files, installed, read_requirements


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
