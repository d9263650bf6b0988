"""Judges the operating system, memory, disks and files, from facts only."""

import re
from pathlib import PurePosixPath, PureWindowsPath

from vae.checks.facts import Facts, Folder
from vae.checks.folders import VGG_FILE
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check, check
from vae.config.options import Config
from vae.config.recipes import RECIPES
from vae.system.addresses import is_remote
from vae.system.console import fetch_command
from vae.system.host import GIB, MIB, decoding_processes

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
LOCAL = "a folder on a local disk, not a synced one"


def judge_host(facts: Facts) -> list[Check]:
    folders = [_folder(facts, folder) for folder in facts.folders]
    return [*_system(facts), *_memory(facts), *_windows(facts), *folders, *_disk(facts)]


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


def _system(facts: Facts) -> list[Check]:
    host = facts.host
    found = f"{host.system} {host.release}, {host.machine}" + (f", WSL {host.wsl}" if host.wsl else "")
    cores = f"{host.cores_usable} of {host.cores} usable; {workers(facts)} for decoding images"
    prepare = "prepare images at their training size: prepare_data.py --mode preprocess"
    systems = [
        # learn.microsoft.com/windows/wsl/compare-versions: only WSL 2 supports cards
        (host.wsl == 1, WARN, found, "in PowerShell: wsl --set-version Ubuntu 2"),
        (host.system in ("Linux", "Windows"), PASS, found),
        (True, WARN, found),
    ]
    counts = [
        (host.cores_usable >= 4, PASS, cores),
        (host.cores_usable < host.cores, WARN, cores, "give the container more cores: docker run --cpus"),
        (True, WARN, cores, prepare),
    ]
    return [
        check("system.os", "System", "Linux, Windows or WSL 2", systems),
        check("system.cores", "Cores", "4 or more: --num_workers auto leaves 2 for training", counts),
    ]


def _memory(facts: Facts) -> list[Check]:
    """Whether training, its decoding processes and their prefetched batches have enough memory.

    If /dev/shm is full, decoding dies of a bus error.
    """
    host, standard, default = facts.host, _prefetched(facts, "standard"), _prefetched(facts)
    free, needed = min(host.memory_free, host.memory_limit or host.memory_free), standard
    needed += PROCESS_BYTES * (1 + workers(facts))
    found = f"{free / GIB:.1f} of {host.memory_total / GIB:.1f} GiB free"
    found += f", the container may use {host.memory_limit / GIB:.1f}" if host.memory_limit else ""
    end_others = "end other programs, or train with --num_workers 1"
    memory = [
        (free >= needed, PASS, found),
        (free >= 2 * PROCESS_BYTES, WARN, found, end_others),
        (True, FAIL, found, end_others),
    ]
    shared = host.shared_memory or 0
    size = "missing" if host.shared_memory is None else f"{shared / GIB:.2f} GiB"
    enlarge = f"docker run --shm-size={max(1, -(-standard // GIB))}g, or train with --num_workers 0"
    shm = [
        (host.system != "Linux", SKIP, "only Linux passes batches through it"),
        (shared >= standard, PASS, size),
        (shared >= default, WARN, size, enlarge),
        (True, FAIL, size, enlarge),
    ]
    profile = f"{needed / GIB:.1f} GiB for profile standard with {workers(facts)} decoding processes"
    batches = f"{standard / GIB:.1f} GiB for profile standard, {default / MIB:.0f} MiB by default"
    return [
        check("system.memory", "Main memory", profile, memory),
        check("system.shm", "/dev/shm", batches, shm),
    ]


def _windows(facts: Facts) -> list[Check]:
    """Page file (without one, loading CUDA's libraries fails with WinError 1455) and long paths."""
    windows = facts.host.windows
    lines = windows.page_files if windows else None
    limit = max_page_file_bytes(lines or ())
    found = f"fixed, at most {limit / GIB:.1f} GiB" if limit else "none"
    manage = "SystemPropertiesPerformance.exe: Advanced, Virtual memory, Automatically manage"
    page_file = [
        (windows is None, SKIP, "only Windows has one"),
        (lines is None, SKIP, "its setting is unknown"),
        (limit is None, PASS, "managed by Windows"),
        (limit and limit >= facts.host.memory_total, PASS, found),
        (True, WARN, found, manage),
    ]
    key = r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem"
    switch_on = f"as administrator: reg add {key} /v LongPathsEnabled /t REG_DWORD /d 1 /f"
    long_paths = [
        (windows is None, SKIP, "only Windows limits path lengths"),
        (windows and windows.long_paths, PASS, "on"),
        (True, WARN, "off", switch_on),
    ]
    caches = "on: paths in the caches of torch.compile are longer than 260 characters"
    managed = "managed by Windows, or at least as large as main memory"
    return [
        check("system.page_file", "Page file", managed, page_file),
        check("system.long_paths", "Long paths", caches, long_paths),
    ]


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


def _folder(facts: Facts, folder: Folder) -> Check:
    """Whether a folder can be used, and is on a disk that is suitable for training."""
    path, flag = folder.path, folder.flag
    permissions = "correct its permissions" + (f", or use another folder: {flag} DIR" if flag else "")
    absent, service = f"{path} does not exist", synced_by(folder.nearest, windows=facts.on_windows)
    no_images = not folder.exists and flag == "--data_path"
    found = path if folder.exists else f"{path}, will be created in {folder.nearest}"
    kind = "a Windows drive mounted in WSL" if facts.host.wsl else "a network drive"
    slow = f"{found}: {kind} ({folder.file_system}), slow with many files"
    synced = f"{found}: {service} uploads every file that is written there"
    cases = [
        (is_remote(path), SKIP, f"{path} is on a remote store", "", LOCAL),
        (folder.problem, FAIL, f"{path}: {folder.problem}", permissions),
        (no_images and folder.given, FAIL, absent, f"set {flag} to an existing folder of images"),
        (no_images, SKIP, absent, "", LOCAL),
        (service, WARN, synced, _elsewhere(folder)),
        (folder.file_system in NETWORK, WARN, slow, _elsewhere(folder)),
        (True, PASS, found),
    ]
    return check(f"disk.{folder.purpose.split()[-1]}", f"Folder of {folder.purpose}", LOCAL, cases)


def _elsewhere(folder: Folder) -> str:
    return f"use a local folder: {folder.flag} DIR" if folder.flag else "move the project to a local folder"


def synced_by(path: str, *, windows: bool) -> str | None:
    """The part of a path that names a syncing service (OneDrive - Company, Dropbox); None without one."""
    parts = (PureWindowsPath if windows else PurePosixPath)(path).parts
    return next((part for part in parts if SYNCED.match(part)), None)


def _disk(facts: Facts) -> list[Check]:
    """Space for the checkpoints of a run, and the weights of LPIPS."""
    folder, vgg = facts.folders[0], facts.vgg
    free, needed = folder.free or 0, CHECKPOINT_BYTES * CHECKPOINTS
    gib, elsewhere = f"{free / GIB:.1f} GiB", _elsewhere(folder)
    space = [
        (folder.free is None, SKIP, "unknown"),
        (free >= needed, PASS, gib),
        (free >= 2 * CHECKPOINT_BYTES, WARN, gib, elsewhere),
        (True, FAIL, gib, elsewhere),
    ]
    found = "not downloaded yet: the first run downloads them" if vgg.size is None else "incomplete"
    fetch = fetch_command(VGG_URL, vgg.path, windows=facts.on_windows)
    weights = [
        (vgg.size == VGG_BYTES, PASS, vgg.path),
        (True, WARN, f"{found} (not needed with --perceptual_weight 0)", fetch),
    ]
    checkpoints = f"{needed / GIB:.1f} GiB: {CHECKPOINTS} checkpoints of {CHECKPOINT_BYTES / GIB:.2f} GiB"
    file = f"{VGG_FILE}, {VGG_BYTES / MIB:.0f} MiB, in PyTorch's cache"
    return [
        check("disk.space", "Free disk space", checkpoints, space),
        check("disk.vgg", "Weights of LPIPS", file, weights),
    ]
