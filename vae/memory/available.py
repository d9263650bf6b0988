"""How many bytes a run may plan with on a device."""

import os
from pathlib import Path

import torch

CPU_SHARE = 0.5  # of the free memory: data workers and the system need theirs


def available_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are free or already ours, or CPU_SHARE of the free main memory.

    A prediction counts the weights too, so what this process has reserved for them is not subtracted.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return int(_free_main_memory() * CPU_SHARE)


def _free_main_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if os.name == "nt":
        return _free_windows_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_windows_memory() -> int:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong)
            for name in ("total", "free", "page_total", "page_free", "virtual", "vfree", "ext")
        ]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status.free
