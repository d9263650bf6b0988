"""Which packages are installed, read from their files without loading them."""

import importlib.metadata
import re
import sys
from pathlib import Path

from vae.checks.facts import Requirement, TorchFiles

_LINE = re.compile(r"^([A-Za-z0-9._-]+)\s*(.*)$")


def read_requirements(project: Path, name: str = "requirements.txt") -> list[tuple[str, str]]:
    """(package, specifier) of every line, of the files it refers to first."""
    found: list[tuple[str, str]] = []
    for line in (project / name).read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            found += read_requirements(project, line[3:].strip())
        elif line:
            found.append(_LINE.match(line).groups())
    return found


def gather_requirements(project: Path) -> tuple[Requirement, ...]:
    return tuple(Requirement(name, spec, installed(name)) for name, spec in read_requirements(project))


def installed(name: str) -> str | None:
    """Version of an installed package, None where there is none or its record is damaged."""
    try:
        return importlib.metadata.version(name) or None
    except (importlib.metadata.PackageNotFoundError, KeyError, OSError, ValueError):
        return None


def wanted_by(package: str, wanted: str) -> str | None:
    """The specifier by which one installed package asks for another, None where it does not."""
    try:
        lines = importlib.metadata.requires(package) or []
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return specifier_in(lines, wanted)


def specifier_in(lines: list[str], wanted: str) -> str | None:
    """From lines such as `triton~=3.9.0; platform_system == "Linux"` the specifier of `wanted`."""
    for line in lines:
        requirement = line.split(";")[0]
        found = re.match(rf"(?:pytorch-)?{re.escape(wanted)}\s*\(?\s*([=~!<>][^)]*)\)?\s*$", requirement)
        if found and "extra ==" not in line:
            return found[1].replace(" ", "")
    return None


def gather_torch_files() -> TorchFiles:
    """What torch, torchvision and Triton say of themselves in their files."""
    torch_says = _version_file("torch")
    vision_says = _version_file("torchvision")
    triton = "triton-windows" if sys.platform == "win32" else "triton"
    triton = next((name for name in (triton, "pytorch-triton") if installed(name)), triton)
    return TorchFiles(
        version=torch_says.get("__version__") or installed("torch"),
        cuda=torch_says.get("cuda"),
        hip=torch_says.get("hip"),
        vision_version=vision_says.get("__version__") or installed("torchvision"),
        vision_wants_torch=wanted_by("torchvision", "torch"),
        triton_name=triton,
        triton_version=installed(triton),
        triton_wanted=wanted_by("torch", "triton"),
    )


def _version_file(package: str) -> dict[str, str]:
    """Texts that a package's version.py assigns; the package itself is not loaded."""
    for folder in sys.path:
        try:
            text = Path(folder or ".", package, "version.py").read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        return dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return {}
