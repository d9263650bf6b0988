"""The facts about this machine: the operating system, packages, cards, and the folders of training."""

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from vae.checks import nvidia_smi, packages, torch_process
from vae.checks.facts import Facts, Folder, HostFacts, LoadedTorch
from vae.config.options import Config
from vae.system.addresses import is_remote, public_text
from vae.system.files import nearest_existing, read_text
from vae.system.host import free_memory, main_memory, usable_cores

VGG_FILE = "vgg16-397923af.pth"  # torchvision's VGG16_Weights.IMAGENET1K_V1, the trunk of LPIPS
TORCH_SECONDS = 300.0  # a first import from a cold disk under a virus scanner


def gather(project: Path, output_dir: str, data_path: str | None) -> Facts:
    """All facts; a child process imports PyTorch while this process gathers the rest.

    If `data_path` is None, the trainer's default is checked; that folder does not have to exist.
    """
    images = Config().data.data_path if data_path is None else data_path
    child, loaded = None, LoadedTorch(installed=False)
    if _is_installed("torch"):
        try:
            child = torch_process.start(project)
        except OSError as error:
            loaded = LoadedTorch(error=f"a second Python cannot be started: {error.strerror or error}")
    vgg = vgg_path()
    facts = Facts(
        project=str(project),
        python=sys.executable,
        project_python=project_python(project),
        requirements=packages.gather_requirements(project),
        torch_files=packages.gather_torch_files(),
        loaded=loaded,
        smi=nvidia_smi.query(),
        host=gather_host(),
        folders=(
            gather_folder("--output_dir", output_dir, given=True, writes=True),
            gather_folder("--data_path", images, given=data_path is not None, writes=False),
        ),
        vgg_path=str(vgg),
        vgg_bytes=vgg.stat().st_size if os.path.exists(vgg) else None,
    )
    if child is None:
        return facts
    return replace(facts, loaded=torch_process.parse(child.finish(TORCH_SECONDS)))


def _is_installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


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


def find_compiler() -> str | None:
    """The C compiler that Triton and torch.compile would use."""
    names = (os.environ.get("CC", "gcc"), "cc", "clang", "cl")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def gather_folder(flag: str, path: str, *, given: bool, writes: bool) -> Folder:
    """Facts about `path`, or about its nearest existing parent if it does not exist yet."""
    if is_remote(path):
        return Folder(flag, public_text(path), given, False, "")
    problem = None
    try:
        absolute = Path(path).expanduser().absolute()
        try:
            exists = bool(absolute.lstat())
        except (FileNotFoundError, NotADirectoryError):
            exists = False
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
