"""The stamp of a complete environment: which build of torch it has, and what it was asked for.

It holds the digests of the requirements: others are a reason to install. Reading it costs milliseconds.
"""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".setup-stamp.json"  # the launchers look for it
BEGUN = ".setup-begun.json"  # in its place while an installation is under way


def digest(name: str) -> str:
    """SHA-256 of a file of requirements."""
    # Line ends differ between checkouts; what is asked for does not.
    return hashlib.sha256((ROOT / name).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def wanted(test: bool) -> dict[str, str]:
    """What the stamp of a complete environment says of the requirements."""
    wants = {"torch_pair": digest("requirements-torch.txt"), "training": digest("requirements.txt")}
    return wants | {"tests": digest("requirements-test.txt")} if test else wants


def read_stamp(venv: Path, name: str = STAMP) -> dict:
    """The stamp; empty where there is none that can be read."""
    try:
        stamp = json.loads((venv / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, name: str, stamp: dict) -> None:
    """Write the stamp whole or not at all."""
    new = venv / (name + ".new")
    new.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    new.replace(venv / name)


def build_of(venv: Path) -> str | None:
    """The build the environment has, or was to get when an installation was interrupted."""
    return read_stamp(venv).get("build") or read_stamp(venv, BEGUN).get("build")


def has_requirements(venv: Path, test: bool = False) -> bool:
    """Whether the stamp names the requirements of today; a matter of milliseconds."""
    stamp = read_stamp(venv)
    return all(stamp.get(part) == want for part, want in wanted(test).items())
