"""The stamp of a complete environment: its build of torch, its folder, and digests of its requirements.

If a digest differs from the current requirements, packages must be installed. Reading the stamp takes
milliseconds.
"""

import hashlib
from pathlib import Path

from vae.checks.machine import read_requirements
from vae.system.files import read_json

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-lock.txt"
STAMP = ".setup-stamp.json"  # the shell scripts test whether it exists
BEGUN = ".setup-begun.json"  # replaces the stamp during an installation


def torch_requirements() -> list[str]:
    """The lines of requirements.txt for torch and torchvision, which are installed first, from one index."""
    pairs = read_requirements(ROOT)
    return [name + specifier for name, specifier in pairs if name in ("torch", "torchvision")]


def torch_pair_digest() -> str:
    """SHA-256 of the requirements for torch and torchvision."""
    return hashlib.sha256("\n".join(torch_requirements()).encode()).hexdigest()


def file_digest(name: str) -> str:
    """SHA-256 of a requirements file, with the same result for both kinds of line ends."""
    return hashlib.sha256((ROOT / name).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def wanted(test: bool, locked: bool = False) -> dict[str, str]:
    """The digests in the stamp of a complete environment."""
    wants = {"torch_pair": torch_pair_digest(), "training": file_digest("requirements.txt")}
    if locked:
        wants["locked"] = file_digest(LOCK)
    return wants | {"tests": file_digest("requirements-test.txt")} if test else wants


def read_stamp(venv: Path, name: str = STAMP) -> dict[str, str]:
    """The stamp; empty if it is missing or cannot be read."""
    try:
        stamp = read_json(venv / name)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def build_of(venv: Path) -> str | None:
    """The installed build, or the one that an interrupted installation was for."""
    return read_stamp(venv).get("build") or read_stamp(venv, BEGUN).get("build")


def is_locked(venv: Path) -> bool:
    """Whether the environment was made with --locked; it stays so until its folder is deleted."""
    return "locked" in (read_stamp(venv) or read_stamp(venv, BEGUN))


def is_moved(venv: Path) -> bool:
    """Whether an environment was made in another folder: its programs contain absolute paths."""
    return read_stamp(venv).get("folder") != str(venv.resolve())


def why_incomplete(venv: Path, test: bool = False, locked: bool = False) -> str | None:
    """Why an environment with a stamp must be completed; None if its stamp fits."""
    stamp = read_stamp(venv)
    wants = wanted(test, locked or "locked" in stamp)
    if any(stamp.get(part) != want for part, want in wants.items()):
        return "the requirements have changed"
    return "its folder was moved" if is_moved(venv) else None
