"""The facts about this machine: the system, the folders of training, nvidia-smi's cards, and packages."""

import csv
import importlib.metadata
import operator
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from vae.checks import torch_process
from vae.checks.facts import Card, Facts, Folder, HostFacts, Requirement, Smi, TorchFiles
from vae.config.options import Config
from vae.system.addresses import is_remote, public_text
from vae.system.child_process import ChildProcess
from vae.system.files import nearest_existing, probe_folder, read_text, sha256_of_file
from vae.system.host import find_compiler, free_memory, main_memory, usable_cores

VGG_FILE = "vgg16-397923af.pth"  # torchvision's VGG16_Weights.IMAGENET1K_V1, the trunk of LPIPS
FINDMNT_SECONDS = 5.0  # a network drive that does not answer


def gather(project: Path, output_dir: str, data_path: str | None) -> Facts:
    """All facts.

    If `data_path` is None, the trainer's default is checked; that folder does not have to exist.
    """
    images = " ".join(Config().data.data_path) if data_path is None else data_path
    vgg = vgg_path()
    return Facts(
        project=str(project),
        python=sys.executable,
        project_python=project_python(project),
        requirements=gather_requirements(project),
        torch_files=gather_torch_files(),
        loaded=torch_process.load(project),
        smi=query_nvidia_smi(),
        host=gather_host(),
        folders=(
            gather_folder("--output_dir", output_dir, given=True, writes=True),
            gather_folder("--data_path", images, given=data_path is not None, writes=False),
        ),
        vgg_path=str(vgg),
        vgg_sha256=sha256_of_file(vgg) if os.path.isfile(vgg) else None,
    )


def project_python(project: Path) -> str | None:
    """Python of the project's own environment, if another Python runs now."""
    own = Path(".venv", "Scripts/python.exe" if os.name == "nt" else "bin/python")
    # os.path.exists: Path.exists() would raise for a folder that this user may not read
    is_other = os.path.exists(project / own) and Path(sys.prefix) != project / ".venv"
    return str(own) if is_other else None


def gather_host() -> HostFacts:
    return HostFacts(
        system=platform.system(),
        wsl="microsoft" in platform.release().lower(),
        cores_usable=usable_cores(),
        memory_total=main_memory()[0],
        memory_free=free_memory(),
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        c_compiler=find_compiler(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def gather_folder(flag: str, path: str, *, given: bool, writes: bool) -> Folder:
    """Facts about `path`, or about its nearest existing parent if it does not exist yet."""
    if is_remote(path):
        return Folder(flag, public_text(path), given, False, "")
    problem = None
    try:
        absolute = Path(path).absolute()
        try:
            exists = bool(absolute.lstat())
        except (FileNotFoundError, NotADirectoryError):
            exists = False
        nearest = nearest_existing(absolute)
        if not nearest.is_dir():
            problem = f"{nearest} is a file" if nearest != absolute or writes else None
        elif writes:
            probe_folder(nearest)
        elif exists:
            next(os.scandir(nearest), None)
        free = shutil.disk_usage(nearest).free
    except (OSError, ValueError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        return Folder(flag, path, given, True, path, problem=problem)
    return Folder(flag, path, given, exists, str(nearest), free, _file_system(nearest), problem)


def _file_system(path: Path) -> str | None:
    if sys.platform == "win32":
        import ctypes

        drive, remote = path.resolve().drive, 4  # DRIVE_REMOTE
        is_share = drive.startswith("\\\\") or ctypes.windll.kernel32.GetDriveTypeW(f"{drive}\\") == remote
        return "network" if is_share else "local"
    try:  # a part of util-linux; macOS and small images of Linux have none
        process = ChildProcess(["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(path)])
    except OSError:
        return None
    return next(reversed(process.finish(FINDMNT_SECONDS).out.split()), None)  # the last mount covers others


def vgg_path() -> Path:
    """The path at which torch.hub stores the weights, by its documented rules, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or os.path.join(cache, "torch")
    return Path(os.path.expanduser(home), "hub", "checkpoints", VGG_FILE)


# ---- nvidia-smi --------------------------------------------------------------------------------------------
# Names of `nvidia-smi --help-query-gpu`. Every driver that runs a supported PyTorch (525 or newer) has them.
SMI_FIELDS = ("index", "name", "driver_version", "memory.total", "compute_cap")
SMI_SECONDS = 15.0  # a sleeping card takes seconds to wake up


def query_nvidia_smi(timeout_seconds: float = SMI_SECONDS) -> Smi:
    """Run nvidia-smi with a time limit."""
    program = find_nvidia_smi()
    if program is None:
        return Smi("missing")
    command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        process = ChildProcess(command).finish(timeout_seconds)
    except OSError as error:
        return Smi("failed", f"{program}: {error.strerror or error}")
    if process.code is None:
        return Smi("hanging", f"no answer in {timeout_seconds:g} s")
    return parse_nvidia_smi(process.code, process.out, process.err)


def find_nvidia_smi() -> str | None:
    # Under WSL its folder may be missing from PATH.
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")


def parse_nvidia_smi(code: int, out: str, err: str) -> Smi:
    """The output of the query; output without any card is taken as an error message."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(out.splitlines(), skipinitialspace=True)]
    rows = [row for row in rows if len(row) == len(SMI_FIELDS) and row[0].isdigit()]
    if rows:
        return Smi("answered", "", rows[0][2], tuple(map(_card, rows)))
    message = " ".join((out + " " + err).split())
    if "no devices were found" in message.lower() or (code == 0 and not message):
        return Smi("answered", message)
    return Smi("failed", message or f"it ended with code {code}")


def _card(row: list[str]) -> Card:
    """A row of the output; values such as [N/A], [Not Supported] or [Unknown Error] become None."""
    _, name, _, total, version = row
    match = re.fullmatch(r"(\d+)\.(\d+)", version)
    capability = (int(match[1]), int(match[2])) if match else None
    return Card(name, capability, int(total) if total.isdigit() else None)


# ---- Packages ----------------------------------------------------------------------------------------------
# Which are installed, read from their files, and versions compared as pip does.

_LINE = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)(?:; python_version (.+))?")
_CLAUSE = re.compile(r"(~=|[=!<>]=|[<>])\s*\"?([^,;\s)\"]+)")
_ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def read_requirements(project: Path) -> list[tuple[str, str]]:
    """(package, specifier) of every line of requirements.txt that applies to this version of Python.

    Without this file, of the metadata that `pip install` wrote.
    """
    file = project / "requirements.txt"
    metadata = importlib.metadata.requires
    texts = read_text(file).splitlines() if file.is_file() else metadata("vae-trainer") or []
    lines = (line.split("#")[0].strip() for line in texts)
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
