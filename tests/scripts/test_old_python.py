"""A Python that is too old prints one line with the remedy, whichever script it runs."""

import ast
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT

SCRIPTS = [path.name for path in ROOT.glob("*.py")]


@pytest.mark.parametrize("name", [*SCRIPTS, "vae/__init__.py"])
def test_old_python_can_parse_the_file(name):
    ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 7))


@pytest.mark.parametrize("name", [*SCRIPTS, "launchers/training.py"])
def test_old_python_prints_one_line(name):
    code = (
        "import sys, runpy; sys.version_info = (3, 9, 18); sys.argv = ['x', '--help']; "
        f"sys.path[0] = {str(ROOT)!r}; runpy.run_path({str(ROOT / name)!r}, run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1, found.stderr
    for token in ("Python 3.9.18", "3.10", "setup", "activate"):
        assert token in found.stderr
