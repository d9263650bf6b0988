"""Judges the operating system, memory, disks and files, from facts only."""

import re
from pathlib import PurePosixPath, PureWindowsPath

from vae.checks import remedies
from vae.checks.facts import Facts, Folder
from vae.checks.folders import VGG_FILE
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check
from vae.config.addresses import is_remote
from vae.config.options import Config
from vae.config.recipes import RECIPES
from vae.console import fetch_command
from vae.host import GIB, MIB, decoding_processes

# Parameters of the default autoencoder (docs/results.md); a test compares this with the model.
DEFAULT_PARAMETERS = 83_819_683
# fp32 weights, both moments of AdamW, EMA weights.
CHECKPOINT_BYTES = DEFAULT_PARAMETERS * 4 * 4
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


def judge_host(facts: Facts) -> list[Check]:
    return [
        _system(facts),
        _cores(facts),
        _memory(facts),
        _shared_memory(facts),
        _page_file(facts),
        _long_paths(facts),
        *(_folder(facts, folder) for folder in facts.folders),
        _space(facts),
        _vgg(facts),
    ]


def workers(facts: Facts) -> int:
    """Number of decoding processes that --num_workers auto starts on this machine."""
    return decoding_processes(facts.host.cores_usable, remedies.on_windows(facts))


def batch_bytes(profile: str | None = None) -> int:
    """Bytes of one batch of uint8 images, for a profile or for the defaults."""
    values = RECIPES[profile].values if profile else {}
    size = values.get("image_size", Config().data.image_size)
    return values.get("batch_size", Config().run.batch_size) * 3 * size * size


def _system(facts: Facts) -> Check:
    host = facts.host
    found = f"{host.system} {host.release}, {host.machine}" + (f", WSL {host.wsl}" if host.wsl else "")
    expected = "Linux, Windows or WSL 2"
    if host.wsl == 1:  # learn.microsoft.com/windows/wsl/compare-versions: only WSL 2 supports cards
        remedy = "in PowerShell: wsl --set-version Ubuntu 2"
        return Check("system.os", "System", WARN, found, expected, remedy)
    status = PASS if host.system in ("Linux", "Windows") else WARN
    return Check("system.os", "System", status, found, expected)


def _cores(facts: Facts) -> Check:
    host = facts.host
    found = f"{host.cores_usable} of {host.cores} usable; {workers(facts)} for decoding images"
    expected = "4 or more: --num_workers auto leaves 2 for training"
    if host.cores_usable >= 4:
        return Check("system.cores", "Cores", PASS, found, expected)
    limited = host.cores_usable < host.cores
    remedy = "prepare images at their training size: prepare_data.py --mode preprocess"
    if limited:
        remedy = "give the container more cores: docker run --cpus"
    return Check("system.cores", "Cores", WARN, found, expected, remedy)


def _memory(facts: Facts) -> Check:
    """Whether main memory suffices for training, its decoding processes and their prefetched batches."""
    host = facts.host
    free = min(host.memory_free, host.memory_limit or host.memory_free)
    prefetched = batch_bytes("standard") * Config().data.prefetch_factor * workers(facts)
    needed = PROCESS_BYTES * (1 + workers(facts)) + prefetched
    found = f"{free / GIB:.1f} of {host.memory_total / GIB:.1f} GiB free"
    if host.memory_limit:
        found += f", the container may use {host.memory_limit / GIB:.1f}"
    expected = f"{needed / GIB:.1f} GiB for profile standard with {workers(facts)} decoding processes"
    if free >= needed:
        return Check("system.memory", "Main memory", PASS, found, expected)
    status = WARN if free >= 2 * PROCESS_BYTES else FAIL
    remedy = "end other programs, or train with --num_workers 1"
    return Check("system.memory", "Main memory", status, found, expected, remedy)


def _shared_memory(facts: Facts) -> Check:
    """Whether /dev/shm has room for the prefetched batches; if it is full, decoding dies of a bus error."""
    check, title, size = "system.shm", "/dev/shm", facts.host.shared_memory
    if facts.host.system != "Linux":
        return Check(check, title, SKIP, "only Linux passes batches through it")
    batches = Config().data.prefetch_factor * workers(facts)
    default, standard = batch_bytes() * batches, batch_bytes("standard") * batches
    expected = f"{standard / GIB:.1f} GiB for profile standard, {default / MIB:.0f} MiB by default"
    found = "missing" if size is None else f"{size / GIB:.2f} GiB"
    if size is not None and size >= standard:
        return Check(check, title, PASS, found, expected)
    remedy = f"docker run --shm-size={max(1, -(-standard // GIB))}g, or train with --num_workers 0"
    return Check(check, title, FAIL if (size or 0) < default else WARN, found, expected, remedy)


def _page_file(facts: Facts) -> Check:
    """Whether there is a page file: without one, loading CUDA's libraries fails with WinError 1455."""
    check, title, windows = "system.page_file", "Page file", facts.host.windows
    if windows is None or windows.page_files is None:
        reason = "only Windows has one" if windows is None else "its setting is unknown"
        return Check(check, title, SKIP, reason)
    limit = max_page_file_bytes(windows.page_files)
    expected = "managed by Windows, or at least as large as main memory"
    remedy = "SystemPropertiesPerformance.exe: Advanced, Virtual memory, Automatically manage"
    if limit is None:
        return Check(check, title, PASS, "managed by Windows", expected)
    if limit == 0:
        return Check(check, title, WARN, "none", expected, remedy)
    found = f"fixed, at most {limit / GIB:.1f} GiB"
    fine = limit >= facts.host.memory_total
    return Check(check, title, PASS if fine else WARN, found, expected, "" if fine else remedy)


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


def _long_paths(facts: Facts) -> Check:
    check, title, windows = "system.long_paths", "Long paths", facts.host.windows
    if windows is None:
        return Check(check, title, SKIP, "only Windows limits path lengths")
    expected = "on: paths in the caches of torch.compile are longer than 260 characters"
    if windows.long_paths:
        return Check(check, title, PASS, "on", expected)
    key = r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem"
    remedy = f"as administrator: reg add {key} /v LongPathsEnabled /t REG_DWORD /d 1 /f"
    return Check(check, title, WARN, "off", expected, remedy)


def _folder(facts: Facts, folder: Folder) -> Check:
    """Whether a folder can be used, and is on a disk that is suitable for training."""
    check = "disk." + folder.purpose.split()[-1]
    title = f"Folder of {folder.purpose}"
    expected = "a folder on a local disk, not a synced one"
    if is_remote(folder.path):
        return Check(check, title, SKIP, f"{folder.path} is on a remote store", expected)
    if folder.problem:
        other = f", or use another folder: {folder.flag} DIR" if folder.flag else ""
        remedy = f"correct its permissions{other}"
        return Check(check, title, FAIL, f"{folder.path}: {folder.problem}", expected, remedy)
    if not folder.exists and folder.flag == "--data_path":
        status = FAIL if folder.given else SKIP
        remedy = f"set {folder.flag} to an existing folder of images" if folder.given else ""
        return Check(check, title, status, f"{folder.path} does not exist", expected, remedy)
    found = folder.path if folder.exists else f"{folder.path}, will be created in {folder.nearest}"
    service = synced_by(folder.nearest, windows=remedies.on_windows(facts))
    if service:
        found += f": {service} uploads every file that is written there"
        return Check(check, title, WARN, found, expected, _elsewhere(folder))
    if folder.file_system in NETWORK:
        kind = "a Windows drive mounted in WSL" if facts.host.wsl else "a network drive"
        found += f": {kind} ({folder.file_system}), slow with many files"
        return Check(check, title, WARN, found, expected, _elsewhere(folder))
    return Check(check, title, PASS, found, expected)


def _elsewhere(folder: Folder) -> str:
    return f"use a local folder: {folder.flag} DIR" if folder.flag else "move the project to a local folder"


def synced_by(path: str, *, windows: bool) -> str | None:
    """The part of a path that names a syncing service (OneDrive - Company, Dropbox); None without one."""
    parts = (PureWindowsPath if windows else PurePosixPath)(path).parts
    return next((part for part in parts if SYNCED.match(part)), None)


def _space(facts: Facts) -> Check:
    check, title, folder = "disk.space", "Free disk space", facts.folders[0]
    if folder.free is None:
        return Check(check, title, SKIP, "unknown")
    found = f"{folder.free / GIB:.1f} GiB"
    needed = CHECKPOINT_BYTES * CHECKPOINTS
    expected = f"{needed / GIB:.1f} GiB: {CHECKPOINTS} checkpoints of {CHECKPOINT_BYTES / GIB:.2f} GiB"
    if folder.free >= needed:
        return Check(check, title, PASS, found, expected)
    status = WARN if folder.free >= 2 * CHECKPOINT_BYTES else FAIL
    return Check(check, title, status, found, expected, _elsewhere(folder))


def _vgg(facts: Facts) -> Check:
    check, title, file = "disk.vgg", "Weights of LPIPS", facts.vgg
    expected = f"{VGG_FILE}, {VGG_BYTES / MIB:.0f} MiB, in PyTorch's cache"
    if file.size == VGG_BYTES:
        return Check(check, title, PASS, file.path, expected)
    found = "not downloaded yet: the first run downloads them" if file.size is None else "incomplete"
    found += " (not needed with --perceptual_weight 0)"
    remedy = fetch_command(VGG_URL, file.path, windows=remedies.on_windows(facts))
    return Check(check, title, WARN, found, expected, remedy)
