"""The facts about this machine: the operating system, packages, cards, and the folders of training."""

import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from vae.checks import nvidia_smi, packages, torch_process
from vae.checks.facts import Facts, Folder, HostFacts
from vae.config.options import Config
from vae.system.addresses import is_remote, public_text
from vae.system.child_process import ChildProcess
from vae.system.files import nearest_existing
from vae.system.host import find_compiler, free_memory, main_memory, usable_cores

VGG_FILE = "vgg16-397923af.pth"  # torchvision's VGG16_Weights.IMAGENET1K_V1, the trunk of LPIPS
FINDMNT_SECONDS = 5.0  # a network drive that does not answer


def gather(project: Path, output_dir: str, data_path: str | None) -> Facts:
    """All facts.

    If `data_path` is None, the trainer's default is checked; that folder does not have to exist.
    """
    images = Config().data.data_path if data_path is None else data_path
    vgg = vgg_path()
    return Facts(
        project=str(project),
        python=sys.executable,
        project_python=project_python(project),
        requirements=packages.gather_requirements(project),
        torch_files=packages.gather_torch_files(),
        loaded=torch_process.load(project),
        smi=nvidia_smi.query(),
        host=gather_host(),
        folders=(
            gather_folder("--output_dir", output_dir, given=True, writes=True),
            gather_folder("--data_path", images, given=data_path is not None, writes=False),
        ),
        vgg_path=str(vgg),
        vgg_bytes=vgg.stat().st_size if os.path.exists(vgg) else None,
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
    try:  # a part of util-linux; macOS and small images of Linux have none
        process = ChildProcess(["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(path)])
    except OSError:
        return None
    return next(reversed(process.finish(FINDMNT_SECONDS).out.split()), None)  # the last mount covers others


def vgg_path() -> Path:
    """Where torch.hub stores the weights, by its documented rules, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or os.path.join(cache, "torch")
    return Path(os.path.expanduser(home), "hub", "checkpoints", VGG_FILE)
