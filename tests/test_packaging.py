"""The package metadata of pyproject.toml: every data file is included, and requirements can be parsed."""

import fnmatch

import pytest
from packaging.requirements import Requirement

from tests.harness.runs import ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_data_files_of_the_package_are_included():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [p.name for p in (ROOT / "vae").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert "py.typed" in files
    assert [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def test_requirements_files_contain_only_requirements():
    """Setuptools reads them line by line and does not support pip's options, such as -r."""
    dynamic = PYPROJECT["tool"]["setuptools"]["dynamic"]
    extras = dynamic["optional-dependencies"]
    assert set(extras) == {"dev", "remote", "tune", "wandb"}
    for files in (dynamic["dependencies"], *extras.values()):
        for name in files["file"]:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
            requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
            different = {(one.name, str(one.marker)) for one in requirements}  # Pillow: one line per Python
            assert len(different) == len(requirements) > 0
