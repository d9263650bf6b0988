"""The number of bytes that a run may use on a device."""

import torch

from vae.system.host import GIB, free_memory

CPU_SHARE = 0.5  # data workers and the system need the rest of the free main memory
# Bytes that must be free on a CUDA device in addition to the live tensors of a step, or it is not chosen. On
# an RTX 5090, cuDNN's first choice needs at most 164 MiB of workspace for each convolution of a step,
# PyTorch's sums up to 128 MiB (both: benchmarks/LOG.md), cuBLAS 32 MiB. What PyTorch reserves is predicted by
# vae.memory.live_bytes: it frees gaps when memory is short. cuDNN's search in the first step of a shape uses
# what is free, and PyTorch returns it. Not measured on a card yet.
CUDA_RESERVE = GIB // 2


def available_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are free or already reserved by us, or CPU_SHARE of the free main memory.

    A prediction includes the weights, so memory that this process has reserved for them is not subtracted.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return int(free_memory() * CPU_SHARE)


def limit_memory(device: torch.device, most: int) -> None:
    """Let PyTorch's allocator reserve at most `most` bytes of a CUDA device in this process.

    The rest is for memory that PyTorch does not allocate: kernels that are loaded when they are first used.
    On Windows the driver would not refuse more memory than the card has: it would use main memory instead.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
