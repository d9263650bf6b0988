"""The cores, memory and compiler that a process may use on its host, within the limits of a container."""

import os
import shutil
import sys
from pathlib import Path

from vae.system.files import read_text

GIB, MIB = 2**30, 2**20  # bytes

CGROUP = Path("/sys/fs/cgroup")

# Two cores are left for the training process; more than 12 workers would fill host memory with batches.
SPARE_CORES, MAX_WORKERS = 2, 12
MAX_WORKERS_WINDOWS = 4  # Windows has no fork: each worker imports its own copy of PyTorch


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores this process may use, limited by its affinity and the CPU quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = container_quota(cgroup)
    return max(1, min(cores, int(quota)) if quota else cores)


def decoding_processes(cores: int, windows: bool) -> int:
    """Number of decoding processes that --num_workers auto starts if training may use `cores`."""
    return min(max(cores - SPARE_CORES, 1), MAX_WORKERS_WINDOWS if windows else MAX_WORKERS)


def container_quota(cgroup: Path = CGROUP) -> float | None:
    """CPU quota of the container in cores (cgroup v2 cpu.max, or v1); None without a limit."""
    try:
        text, period_text = read_text(cgroup / "cpu.max").split()
        return None if text == "max" else int(text) / int(period_text)
    except (OSError, ValueError):
        pass
    try:
        quota = int(read_text(cgroup / "cpu/cpu.cfs_quota_us"))
        period = int(read_text(cgroup / "cpu/cpu.cfs_period_us"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None


def container_memory(cgroup: Path = CGROUP) -> int | None:
    """Bytes of memory that the container may use (cgroup v2 memory.max, or v1); None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int(read_text(cgroup / name))
        except (OSError, ValueError):  # no such file; "max"
            continue
        return limit if limit < 2**60 else None  # v1 writes "no limit" as a number near 2**63
    return None


def container_free_memory(cgroup: Path = CGROUP) -> int | None:
    """Bytes of its limit that the container does not use; cached files count as unused, None without a limit.

    The same arithmetic as Kubernetes' working set: usage less the files that nothing has used lately.
    """
    limit = container_memory(cgroup)
    if limit is None:
        return None
    for folder, usage, unused in (
        ("", "current", "inactive_file"),
        ("memory", "usage_in_bytes", "total_inactive_file"),
    ):
        try:
            used = int(read_text(cgroup / folder / f"memory.{usage}"))
            lines = read_text(cgroup / folder / "memory.stat").splitlines()
        except (OSError, ValueError):
            continue
        cached = sum(int(line.split()[1]) for line in lines if line.split()[:1] == [unused])
        return max(0, limit - max(0, used - cached))
    return limit


def main_memory() -> tuple[int, int]:
    """Bytes of main memory: total, and available to a new process; a container's limit is not applied."""
    if sys.platform == "win32":
        import ctypes

        status = (ctypes.c_ulonglong * 8)(64)  # MEMORYSTATUSEX: length, load, then the sizes in bytes
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return status[1], status[2]
    try:
        lines = read_text("/proc/meminfo").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError, IndexError):  # macOS has no /proc
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def free_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of main memory that this process may still use, with the limit of its container."""
    free = main_memory()[1]
    in_container = container_free_memory(cgroup)
    return free if in_container is None else min(free, in_container)


def find_compiler() -> str | None:
    """The C compiler that Triton and torch.compile would use; None if there is none."""
    names = (os.environ.get("CC", "gcc"), "cc", "clang", "cl")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)
