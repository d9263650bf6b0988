"""Facts about Python, the operating system, and the folders that training reads and writes."""

import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from vae.checks.facts import Folder, HostFacts, PythonFacts
from vae.system.addresses import is_remote, public_text
from vae.system.files import nearest_existing, read_text
from vae.system.host import free_memory, main_memory, usable_cores

VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
VGG_FILE = "vgg16-397923af.pth"  # torchvision's VGG16_Weights.IMAGENET1K_V1, the trunk of LPIPS


def gather_python(project: Path) -> PythonFacts:
    own = Path(".venv", "Scripts/python.exe" if os.name == "nt" else "bin/python")
    # os.path.exists: Path.exists() would raise for a folder that this user may not read
    is_other = os.path.exists(project / own) and Path(sys.prefix) != project / ".venv"
    return PythonFacts(
        version=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        bits=64 if sys.maxsize > 2**32 else 32,
        executable=sys.executable,
        project_python=str(own) if is_other else None,
    )


def gather_host() -> HostFacts:
    return HostFacts(
        system=platform.system(),
        release=platform.release(),
        wsl="microsoft" in platform.release().lower(),
        cores_usable=usable_cores(),
        memory_total=main_memory()[0],
        memory_free=free_memory(),
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        c_compiler=find_compiler(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        **(_gather_windows() if sys.platform == "win32" else {}),
    )


def find_compiler() -> str | None:
    """The C compiler that Triton and torch.compile would use."""
    names = (os.environ.get("CC", "gcc"), "cc", "clang", "cl")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def _gather_windows() -> dict[str, Any]:
    """The settings of Windows among the fields of HostFacts."""
    control = r"SYSTEM\CurrentControlSet\Control"
    long_paths = _registry_value(control + r"\FileSystem", "LongPathsEnabled")
    files = _registry_value(control + r"\Session Manager\Memory Management", "PagingFiles")
    return {
        "long_paths": None if long_paths is None else bool(long_paths),
        "page_files": None if files is None else tuple(files),
    }


def _registry_value(key: str, name: str) -> Any:
    """A value of HKEY_LOCAL_MACHINE, of the type stored there; None if it cannot be read."""
    import winreg

    if sys.platform != "win32":  # for the type checker
        raise AssertionError
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
            return winreg.QueryValueEx(opened, name)[0]
    except OSError:
        return None


def gather_folder(flag: str, path: str, *, given: bool, writes: bool) -> Folder:
    """Facts about `path`, or about its nearest existing parent if it does not exist yet."""
    if is_remote(path):
        return Folder(flag, public_text(path), given, False, "")
    problem = None
    try:
        absolute = Path(path).expanduser().absolute()
        exists = os.path.lexists(absolute)
        nearest = nearest_existing(absolute)
        if not nearest.is_dir():
            problem = f"{nearest} is a file" if nearest != absolute or writes else None
        elif writes:
            with tempfile.TemporaryFile(dir=nearest):
                pass
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
    try:
        mounts = read_text("/proc/mounts")
    except (OSError, ValueError):
        return None
    return kind_of_mount(mounts, str(path.resolve()))


def kind_of_mount(mounts: str, path: str) -> str | None:
    """The file system of `path`, from the text of /proc/mounts: the longest mount point that contains it."""
    best, kind = "", None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        # blanks, tabs and backslashes in a name are written as octal numbers
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[1])
        contains = path == point or path.startswith(point.rstrip("/") + "/")
        if contains and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def vgg_path() -> Path:
    """Where torch.hub stores the weights, by its documented rules, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or os.path.join(cache, "torch")
    return Path(os.path.expanduser(home), "hub", "checkpoints", VGG_FILE)
