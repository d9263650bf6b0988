"""How many bytes a run may plan with on a device."""

import torch

from vae.host import GIB, container_memory, main_memory

CPU_SHARE = 0.5  # of the free memory: data workers and the system need theirs
# What a step takes on a CUDA device beside its live tensors: workspaces of cuDNN and cuBLAS, and gaps that
# the caching allocator cannot fill. A round figure, not measured yet.
CUDA_RESERVE = GIB // 2


def available_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are free or already ours, or CPU_SHARE of the free main memory.

    A prediction counts the weights too, so what this process has reserved for them is not subtracted.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free, limit = main_memory()[1], container_memory()
    return int((free if limit is None else min(free, limit)) * CPU_SHARE)


def reserve_bytes(device: torch.device) -> int:
    """Bytes that a step takes on the device on top of its live tensors."""
    return CUDA_RESERVE if device.type == "cuda" else 0
