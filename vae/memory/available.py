"""How many bytes a run may use on a device."""

import torch

from vae.gpus import measured_values
from vae.host import GIB, free_memory

CPU_SHARE = 0.5  # of the free main memory: data workers and the system need the rest
# Bytes of a step on a CUDA device in addition to its live tensors: workspaces of cuDNN and cuBLAS, and gaps
# that the caching allocator cannot fill. A round figure, not measured yet.
CUDA_RESERVE = GIB // 2


def cuda_reserve(card: str) -> int:
    """CUDA_RESERVE, or what benchmarks/first_hour.py measured on the card that drivers call `card`."""
    measured_mib = measured_values(card).get("reserve_mib")
    return CUDA_RESERVE if measured_mib is None else measured_mib * 2**20


def available_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are free or already reserved by us, or CPU_SHARE of the free main memory.

    A prediction includes the weights, so memory that this process has reserved for them is not subtracted.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return int(free_memory() * CPU_SHARE)
