"""Which packages are installed, read from their files, and versions compared as pip does."""

import importlib.metadata
import operator
import platform
import re
import sys
from pathlib import Path

from vae.checks.facts import Requirement, TorchFiles
from vae.system.files import read_text

_LINE = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)(?:; python_version (.+))?")
_CLAUSE = re.compile(r"(~=|[=!<>]=|[<>])\s*\"?([^,;\s)\"]+)")
_ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def read_requirements(project: Path) -> list[tuple[str, str]]:
    """(package, specifier) of every line of requirements.txt that applies to this version of Python."""
    text = read_text(project / "requirements.txt")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    matches = [match for match in map(_LINE.fullmatch, lines) if match]
    return [(m[1], m[2]) for m in matches if satisfies(platform.python_version(), m[3] or "")]


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


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 15, 0) for 2.15.0a1+cu132."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def build(version: str) -> str:
    """The build of a version: cu132 for 2.15.0+cu132, "" if it has none."""
    return version.partition("+")[2]


def satisfies(version: str, specifier: str) -> bool:
    """Whether `version` matches `specifier`, of clauses as in requirements.txt (">=2.10,!=2.13.0+cpu")."""
    return all(_matches(version, sign, wanted) for sign, wanted in _CLAUSE.findall(specifier))


def _matches(version: str, sign: str, wanted: str) -> bool:
    ours, theirs = ((*release(text), 0, 0, 0, 0)[:5] for text in (version, wanted))
    if sign in _ORDER:
        return _ORDER[sign](ours, theirs)
    if sign == "~=":  # ~=2.10.1 is >=2.10.1,==2.10.*
        series = release(wanted)[:-1]
        return ours >= theirs and ours[: len(series)] == series
    if wanted.endswith(".*"):
        equal = ours[: len(release(wanted))] == release(wanted)
    else:  # 2.13.0+cpu is one build of 2.13.0
        equal = ours == theirs and build(wanted) in ("", build(version))
    return equal == (sign == "==")
