"""The project folder that the tests of the launchers share."""

import os
from pathlib import Path

import pytest

from tests.harness.launcher_projects import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    if os.name == "nt":
        pytest.skip("these tests run the shell scripts")
    return Project(tmp_path / "a b'ü")
