"""setup.sh --locked: exact versions with SHA-256, and minimum versions without known vulnerabilities."""

import hashlib
import json
import os
import re

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

from tests.harness.launcher_projects import make_pair, make_wheel
from tests.harness.runs import ROOT

# The first versions with the fixes of these advisories.
FIXED = {
    "torch": "2.10",  # CVE-2025-32434, CVE-2026-24747
    "tqdm": "4.66.3",  # CVE-2024-34062
    "jinja2": "3.1.6",  # CVE-2025-27516
    "pyvips-binary": "8.18.1",  # CVE-2026-2913; 8.17.2 for earlier ones
    "pillow": "12.3",  # CVE-2026-59197 to CVE-2026-59200, CVE-2026-55798
}


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def locked() -> dict[str, list[tuple[Version, Marker | None, str]]]:
    """Version, marker and hashes of each package in the lock file."""
    found: dict[str, list[tuple[Version, Marker | None, str]]] = {}
    text = (ROOT / "requirements-lock.txt").read_text().replace(" \\\n", " ")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        spec, _, hashes = line.partition(" --hash=")
        one = Requirement(spec)
        ((specifier),) = one.specifier
        assert specifier.operator == "==", line
        found.setdefault(one.name, []).append((Version(specifier.version), one.marker, hashes))
    return found


@pytest.mark.parametrize("name", FIXED)
def test_minimum_version_has_the_fixes(name):
    lowest = [
        Version(specifier.version)
        for one in requirements()
        if one.name.lower() == name
        for specifier in one.specifier
        if specifier.operator == ">="
    ]
    assert lowest
    assert min(lowest) >= Version(FIXED[name])


def test_lock_has_a_version_with_hashes_for_every_requirement_and_python():
    found = locked()
    for python in ("3.10", "3.11", "3.12", "3.14"):
        for one in requirements():
            environment = {"python_version": python, "python_full_version": f"{python}.0"}
            applies = one.marker is None or one.marker.evaluate(environment)
            if not applies or one.name in ("torch", "torchvision"):
                continue
            pinned = [v for v, m, _ in found[one.name.lower()] if m is None or m.evaluate(environment)]
            assert len(pinned) == 1, (one, python)
            assert one.specifier.contains(pinned[0]), (one, python)
    for name, pins in found.items():
        assert all(re.match(r"sha256:[0-9a-f]{64}( |$)", hashes) for _, _, hashes in pins), name
        assert not re.match(r"torch|triton|nvidia|cuda", name), "the build decides about torch"


@pytest.mark.slow
def test_locked_environment_has_the_locked_files_or_none(project, tmp_path):
    """The real pip with tiny wheels: exact versions, a file that was exchanged, and a second set-up."""
    wheels, stamp = tmp_path / "wheels", project.folder / ".venv" / ".setup-stamp.json"
    make_pair(wheels, "2.12.0", "0.27.0")
    for version in ("1.0", "2.0"):
        make_wheel(wheels, "extra", version, "")
    digest = hashlib.sha256((wheels / "extra-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    (project.folder / "requirements.txt").write_text("torch\ntorchvision\nextra\n")
    lock = project.folder / "requirements-lock.txt"

    def setup(*arguments: str):
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        script = project.folder / "setup.sh"
        return project.run(script, *arguments, VAE_TORCH_INDEX="http://127.0.0.1:9/whl", **offline)

    lock.write_text(f"extra==1.0 --hash=sha256:{'0' * 64}\n")
    done = setup("--yes", "--torch", "cpu", "--locked")
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not stamp.exists()
    assert not list(project.folder.glob(".venv/lib/python*/site-packages/extra*"))

    lock.write_text(f"extra==1.0 \\\n    --hash=sha256:{digest}\n")
    make_wheel(wheels, "torch", "2.12.0", "__version__ = '2.12.0'", "Requires-Dist: extra>=2.0\n")
    done = setup("--yes")  # a locked environment stays locked
    assert done.returncode == 1
    assert "conflicting dependencies" in done.stderr
    assert not stamp.exists()

    make_pair(wheels, "2.12.0", "0.27.0")
    done = setup("--yes")
    assert done.returncode == 0, done.stderr
    assert "locked" in json.loads(stamp.read_text())
    assert list(project.folder.glob(".venv/lib/python*/site-packages/extra-1.0.dist-info"))
    assert "is complete" in setup("--yes", "--locked").stdout
    done = setup("--test")
    assert done.returncode == 1
    assert "requirements-lock.txt has no test requirements" in done.stderr


def test_locked_and_test_exclude_each_other(project):
    done = project.run(project.folder / "setup.sh", "--locked", "--test")
    assert done.returncode == 2
    assert "--locked" in done.stderr
