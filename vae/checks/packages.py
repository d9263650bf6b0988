"""Which packages are installed, read from their files without importing them."""

import importlib.metadata
import re
import sys
from pathlib import Path

from vae.checks.facts import Requirement, TorchFiles
from vae.system.files import read_text

_LINE = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)(?:; python_version (<|>=) \"(\d+)\.(\d+)\")?")


def read_requirements(project: Path) -> list[tuple[str, str]]:
    """(package, specifier) of every line of requirements.txt that applies to this version of Python."""
    text = read_text(project / "requirements.txt")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [(match[1], match[2]) for match in map(_LINE.fullmatch, lines) if match and _applies(match)]


def _applies(line: re.Match[str]) -> bool:
    if line[3] is None:
        return True
    is_older = sys.version_info[:2] < (int(line[4]), int(line[5]))
    return is_older if line[3] == "<" else not is_older


def gather_requirements(project: Path) -> tuple[Requirement, ...]:
    return tuple(Requirement(name, spec, installed(name)) for name, spec in read_requirements(project))


def installed(name: str) -> str | None:
    """Version of an installed package; None if it is missing or its metadata is damaged."""
    try:
        return importlib.metadata.version(name) or None
    except (importlib.metadata.PackageNotFoundError, KeyError, OSError, ValueError):
        return None


def gather_torch_files() -> TorchFiles:
    """Versions of torch, torchvision and Triton, from their files."""
    torch_file, vision_file = _version_file("torch"), _version_file("torchvision")
    names = ("triton-windows",) if sys.platform == "win32" else ("triton", "pytorch-triton")
    return TorchFiles(
        version=torch_file.get("__version__") or installed("torch"),
        cuda=torch_file.get("cuda"),
        hip=torch_file.get("hip"),
        vision_version=vision_file.get("__version__") or installed("torchvision"),
        triton_version=next(filter(None, map(installed, names)), None),
    )


def _version_file(package: str) -> dict[str, str]:
    """The strings that a package's version.py assigns; the package itself is not imported."""
    for folder in sys.path:
        try:
            text = read_text(Path(folder or ".", package, "version.py"))
        except (OSError, ValueError):
            continue
        return dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return {}
