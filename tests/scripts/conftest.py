"""Fixtures of the tests of scripts."""

import os
import venv

import pytest


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> str:
    """A Python without packages."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
