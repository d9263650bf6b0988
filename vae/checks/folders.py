"""Folders that training reads and writes: free space, file system, and permissions."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from vae.checks.facts import Folder
from vae.system.addresses import is_remote, public_text
from vae.system.files import nearest_existing, read_text

VGG_FILE = "vgg16-397923af.pth"  # torchvision's VGG16_Weights.IMAGENET1K_V1, the trunk of LPIPS


def gather_folder(purpose: str, flag: str, path: str, given: bool, *, writes: bool) -> Folder:
    """Facts about `path`, or about its nearest existing parent if it does not exist yet."""
    if is_remote(path):
        return Folder(purpose, flag, public_text(path), given, False, "")
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
        return Folder(purpose, flag, path, given, True, path, problem=problem)
    return Folder(purpose, flag, path, given, exists, str(nearest), free, _file_system(nearest), problem)


def _file_system(path: Path) -> str | None:
    if sys.platform == "win32":
        return windows_drive(path)
    try:
        mounts = read_text("/proc/mounts")
    except (OSError, ValueError):
        return None
    return kind_of_mount(mounts, str(path.resolve()))


def windows_drive(path: Path) -> str:
    """ "network" for a share or a mapped drive (GetDriveTypeW), else "local"."""
    import ctypes

    if sys.platform != "win32":  # for the type checker
        raise AssertionError
    drive = path.resolve().drive
    remote = 4  # DRIVE_REMOTE
    if drive.startswith("\\\\") or ctypes.windll.kernel32.GetDriveTypeW(f"{drive}\\") == remote:
        return "network"
    return "local"


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
