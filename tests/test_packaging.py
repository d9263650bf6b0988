"""The package metadata of pyproject.toml: every data file is included, and requirements can be parsed."""

import fnmatch
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.harness.runs import ROOT
from vae import commands

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_data_files_of_the_package_are_included():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [p.name for p in (ROOT / "vae").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert "py.typed" in files
    assert [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def requirements_of(name: str) -> list[str]:
    """The lines of a file; setuptools reads them one by one, without pip's options such as -r."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_requirements_files_contain_only_requirements():
    extras = PYPROJECT["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
    assert set(extras) == {"dev", "diffusers", "prepare", "remote", "report", "tune", "wandb"}
    for name in ("requirements.txt", *(name for files in extras.values() for name in files["file"])):
        requirements = [Requirement(line) for line in requirements_of(name)]
        different = {(one.name, str(one.marker)) for one in requirements}  # Pillow: one line per Python
        assert len(different) == len(requirements) > 0


def test_the_set_up_installs_the_package_with_two_extras():
    extras = [line for name in ("prepare", "report") for line in requirements_of(f"requirements-{name}.txt")]
    assert sorted(requirements_of("requirements.txt")) == sorted(
        PYPROJECT["project"]["dependencies"] + extras
    )


def test_every_program_and_script_runs_a_command():
    programs = PYPROJECT["project"]["scripts"]
    assert [target.partition(":")[0] for target in programs.values()] == ["vae.commands"] * len(SCRIPTS)
    for name, target in programs.items():
        assert getattr(commands, target.partition(":")[2]).args == (name.removeprefix("vae-"),)
    assert sorted(script for script, _, _ in commands._COMMANDS.values()) == SCRIPTS


def test_a_program_prints_its_own_name_in_place_of_the_scripts():
    code = "import sys; sys.argv[0] = 'bin/vae-check'; from vae.commands import vae_check; vae_check()"
    command = [sys.executable, "-c", code]
    usage = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert usage.startswith("usage: vae-check [flags]")
    assert "\n  vae-train --plan " in usage
    assert ".py" not in usage
    mistake = subprocess.run([*command, "--plans"], cwd=ROOT, capture_output=True, text=True).stderr
    assert mistake.startswith("vae-check: unknown flag --plans")
