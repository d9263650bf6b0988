"""Facts about Python and the operating system: cores, memory, compiler, Windows settings."""

import locale
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from vae.checks.facts import HostFacts, PythonFacts
from vae.system.host import container_memory, main_memory, usable_cores

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCHINDUCTOR_CACHE_DIR",
    "OMP_NUM_THREADS",
    "LANG",
    "LC_ALL",
    "PYTHONUTF8",
)


def gather_python(project: Path) -> PythonFacts:
    return PythonFacts(
        version=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        bits=64 if sys.maxsize > 2**32 else 32,
        executable=sys.executable,
        in_environment=sys.prefix != sys.base_prefix or bool(os.environ.get("CONDA_PREFIX")),
        project_python=_other_python(project),
        file_name_encoding=sys.getfilesystemencoding(),
        text_encoding=locale.getpreferredencoding(False),
    )


def _other_python(project: Path) -> str | None:
    name = Path(".venv", "Scripts/python.exe" if os.name == "nt" else "bin/python")
    # os.path.exists: Path.exists() would raise for a folder that this user may not read
    if not os.path.exists(project / name) or Path(sys.prefix) == project / ".venv":
        return None
    return str(name)


def gather_host() -> HostFacts:
    total, free = main_memory()
    return HostFacts(
        system=platform.system(),
        release=platform.release(),
        machine=platform.machine(),
        wsl=wsl_version(platform.release()),
        cores=os.cpu_count() or 1,
        cores_usable=usable_cores(),
        memory_total=total,
        memory_free=free,
        memory_limit=container_memory(),
        shared_memory=_size_of("/dev/shm") if sys.platform == "linux" else None,
        c_compiler=find_compiler(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        **(gather_windows() if sys.platform == "win32" else {}),
    )


def wsl_version(release: str) -> int:
    """1 or 2 from the kernel's name: 4.4.0-19041-Microsoft, 5.15.153.1-microsoft-standard-WSL2; else 0."""
    if "microsoft" not in release.lower():
        return 0
    return 2 if "wsl2" in release.lower() or "microsoft-standard" in release else 1


def find_compiler() -> str | None:
    """The C compiler that Triton and torch.compile would use."""
    names = (os.environ.get("CC", "gcc"), "cc", "clang", "cl")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def _size_of(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def gather_windows() -> dict[str, Any]:
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
