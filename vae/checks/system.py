"""Checks of the operating system, memory, disks and files."""

import re
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath

from vae.checks.facts import Facts, Folder
from vae.checks.folders import VGG_FILE
from vae.checks.table import FAIL, PASS, SKIP, WARN, Cases, Check
from vae.config.options import Config
from vae.config.recipes import RECIPES
from vae.system.addresses import is_remote
from vae.system.console import fetch_command
from vae.system.host import GIB, MIB, decoding_processes

# Parameters of the default autoencoder (docs/results.md); a test compares this with the model.
DEFAULT_PARAMETERS = 83_819_683
CHECKPOINT_BYTES = DEFAULT_PARAMETERS * 4 * 4  # fp32 weights, both moments of AdamW, EMA weights
# --keep_checkpoints, the best, the last of the stage, and the one being written.
CHECKPOINTS = Config().run.keep_checkpoints + 3

# Resident memory of a process that has imported the trainer with torch 2.15 on Linux: 0.69 GiB measured.
# Forked decoding processes share most of it; on Windows each has its own copy.
PROCESS_BYTES = int(0.7 * GIB)

VGG_BYTES = 553_433_881  # size of torchvision's file
VGG_URL = f"https://download.pytorch.org/models/{VGG_FILE}"

NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "9p"),
    *("fuse.sshfs", "fuse.rclone", "fuse.gcsfuse", "fuse.s3fs", "fuse.glusterfs", "drvfs", "network"),
}
SYNCED = re.compile(
    r"^(onedrive|dropbox|google ?drive|icloud ?drive|nextcloud|pcloud|mobile documents)\b", re.I
)
LOCAL = "a folder on a local disk, not a synced one"


def workers(facts: Facts) -> int:
    """Number of decoding processes that --num_workers auto starts on this machine."""
    return decoding_processes(facts.host.cores_usable, facts.on_windows)


def batch_bytes(profile: str | None = None) -> int:
    """Bytes of one batch of uint8 images, for a profile or for the defaults."""
    values = RECIPES[profile].values if profile else {}
    size = values.get("image_size", Config().data.image_size)
    return values.get("batch_size", Config().run.batch_size) * 3 * size * size


def _prefetched(facts: Facts, profile: str | None = None) -> int:
    """Bytes of the batches that the decoding processes prepare ahead."""
    return batch_bytes(profile) * Config().data.prefetch_factor * workers(facts)


def _os(facts: Facts) -> Cases:
    host = facts.host
    found = f"{host.system} {host.release}, {host.machine}" + (f", WSL {host.wsl}" if host.wsl else "")
    # learn.microsoft.com/windows/wsl/compare-versions: only WSL 2 supports cards
    yield host.wsl == 1, WARN, found, "in PowerShell: wsl --set-version Ubuntu 2"
    yield host.system in ("Linux", "Windows"), PASS, found
    yield True, WARN, found


def _cores(facts: Facts) -> Cases:
    usable, cores = facts.host.cores_usable, facts.host.cores
    found = f"{usable} of {cores} usable; {workers(facts)} for decoding images"
    yield usable >= 4, PASS, found
    yield usable < cores, WARN, found, "give the container more cores: docker run --cpus"
    yield True, WARN, found, "prepare images at their training size: prepare_data.py --mode preprocess"


def _memory(facts: Facts) -> Cases:
    host = facts.host
    free = min(host.memory_free, host.memory_limit or host.memory_free)
    needed = _prefetched(facts, "standard") + PROCESS_BYTES * (1 + workers(facts))
    found = f"{free / GIB:.1f} of {host.memory_total / GIB:.1f} GiB free"
    found += f", the container may use {host.memory_limit / GIB:.1f}" if host.memory_limit else ""
    yield free >= needed, PASS, found
    status = WARN if free >= 2 * PROCESS_BYTES else FAIL
    expected = f"{needed / GIB:.1f} GiB for profile standard with {workers(facts)} decoding processes"
    yield True, status, found, "end other programs, or train with --num_workers 1", expected


def _shm(facts: Facts) -> Cases:
    """If /dev/shm is full, decoding dies of a bus error."""
    shared, standard, default = facts.host.shared_memory, _prefetched(facts, "standard"), _prefetched(facts)
    yield facts.host.system != "Linux", SKIP, "only Linux passes batches through it"
    found = "missing" if shared is None else f"{shared / GIB:.2f} GiB"
    yield (shared or 0) >= standard, PASS, found
    status = WARN if (shared or 0) >= default else FAIL
    enlarge = f"docker run --shm-size={max(1, -(-standard // GIB))}g, or train with --num_workers 0"
    expected = f"{standard / GIB:.1f} GiB for profile standard, {default / MIB:.0f} MiB by default"
    yield True, status, found, enlarge, expected


def _page_file(facts: Facts) -> Cases:
    """Without a page file, loading CUDA's libraries fails with WinError 1455."""
    lines = facts.host.page_files
    yield not facts.on_windows, SKIP, "only Windows has one"
    yield lines is None, SKIP, "its setting is unknown"
    limit = max_page_file_bytes(lines or ())
    yield limit is None, PASS, "managed by Windows"
    found = f"fixed, at most {limit / GIB:.1f} GiB" if limit else "none"
    yield limit and limit >= facts.host.memory_total, PASS, found
    yield True, WARN, found, "SystemPropertiesPerformance.exe: Advanced, Virtual memory, Automatically manage"


def max_page_file_bytes(lines: tuple[str, ...]) -> int | None:
    """Maximum total size of the page files in the registry's PagingFiles; None: Windows manages it.

    A line is `C:\\pagefile.sys 1024 4096` with sizes in MiB. The sizes 0 0, missing sizes, or the drive `?:`
    mean that Windows manages the size.
    """
    total = 0
    for line in filter(None, (line.strip() for line in lines)):
        sizes = re.search(r"\s(\d+)\s+(\d+)$", line)
        if line.startswith("?:") or sizes is None or int(sizes[2]) == 0:
            return None
        total += int(sizes[2]) * MIB
    return total


def _long_paths(facts: Facts) -> Cases:
    yield not facts.on_windows, SKIP, "only Windows limits path lengths"
    yield facts.host.long_paths, PASS, "on"
    key = r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem"
    yield True, WARN, "off", f"as administrator: reg add {key} /v LongPathsEnabled /t REG_DWORD /d 1 /f"


def folders(facts: Facts) -> list[Check]:
    """A check for each folder that training reads or writes."""
    return [
        Check(f"disk.{f.purpose.split()[-1]}", f"Folder of {f.purpose}", LOCAL, partial(_folder, f))
        for f in facts.folders
    ]


def _folder(folder: Folder, facts: Facts) -> Cases:
    path, flag = folder.path, folder.flag
    yield is_remote(path), SKIP, f"{path} is on a remote store"
    permissions = "correct its permissions" + (f", or use another folder: {flag} DIR" if flag else "")
    yield folder.problem, FAIL, f"{path}: {folder.problem}", permissions
    no_images, absent = not folder.exists and flag == "--data_path", f"{path} does not exist"
    yield no_images and folder.given, FAIL, absent, f"set {flag} to an existing folder of images"
    yield no_images, SKIP, absent
    found = path if folder.exists else f"{path}, will be created in {folder.nearest}"
    service = synced_by(folder.nearest, windows=facts.on_windows)
    yield service, WARN, f"{found}: {service} uploads every file that is written there", _elsewhere(folder)
    kind = "a Windows drive mounted in WSL" if facts.host.wsl else "a network drive"
    slow = f"{found}: {kind} ({folder.file_system}), slow with many files"
    yield folder.file_system in NETWORK, WARN, slow, _elsewhere(folder)
    yield True, PASS, found


def _elsewhere(folder: Folder) -> str:
    return f"use a local folder: {folder.flag} DIR" if folder.flag else "move the project to a local folder"


def synced_by(path: str, *, windows: bool) -> str | None:
    """The part of a path that names a syncing service (OneDrive - Company, Dropbox); None without one."""
    parts = (PureWindowsPath if windows else PurePosixPath)(path).parts
    return next((part for part in parts if SYNCED.match(part)), None)


def _space(facts: Facts) -> Cases:
    folder, needed = facts.folders[0], CHECKPOINT_BYTES * CHECKPOINTS
    yield folder.free is None, SKIP, "unknown"
    free = folder.free or 0
    yield free >= needed, PASS, f"{free / GIB:.1f} GiB"
    status = WARN if free >= 2 * CHECKPOINT_BYTES else FAIL
    expected = f"{needed / GIB:.1f} GiB: {CHECKPOINTS} checkpoints of {CHECKPOINT_BYTES / GIB:.2f} GiB"
    yield True, status, f"{free / GIB:.1f} GiB", _elsewhere(folder), expected


def _vgg(facts: Facts) -> Cases:
    path, size = facts.vgg_path, facts.vgg_bytes
    yield size == VGG_BYTES, PASS, path
    found = "not downloaded yet: the first run downloads them" if size is None else "incomplete"
    fetch = fetch_command(VGG_URL, path, windows=facts.on_windows)
    yield True, WARN, f"{found} (not needed with --perceptual_weight 0)", fetch


PAGE_FILE = "managed by Windows, or at least as large as main memory"
CACHES = "on: paths in the caches of torch.compile are longer than 260 characters"
SYSTEM = [
    Check("system.os", "System", "Linux, Windows or WSL 2", _os),
    Check("system.cores", "Cores", "4 or more: --num_workers auto leaves 2 for training", _cores),
    Check("system.memory", "Main memory", "", _memory),
    Check("system.shm", "/dev/shm", "", _shm),
    Check("system.page_file", "Page file", PAGE_FILE, _page_file),
    Check("system.long_paths", "Long paths", CACHES, _long_paths),
]
VGG = f"{VGG_FILE}, {VGG_BYTES / MIB:.0f} MiB, in PyTorch's cache"
DISK = [
    Check("disk.space", "Free disk space", "", _space),
    Check("disk.vgg", "Weights of LPIPS", VGG, _vgg),
]
