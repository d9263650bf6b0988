"""How PyTorch's allocator uses a card's memory: environment variables, read when PyTorch starts."""

import os
import platform

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name

# Segments that grow: freed memory is used again whatever its size. With PyTorch's default, segments of fixed
# size, a step reserves up to 15 % more (benchmarks/LOG.md, "Memory that PyTorch reserves").
GROWING_SEGMENTS = "expandable_segments:True"
# PyTorch supports them on Linux only, and under WSL the driver refuses their calls on some machines
# (github.com/pytorch/pytorch/issues/192330). The other remedy: from 90 % of the limit on, free the blocks
# that have not been used for longest. max_split_size_mb made the same steps allocate anew in every step.
FREED_BLOCKS = "garbage_collection_threshold:0.9"


def growing_segments_supported(system: str, release: str) -> bool:
    """Whether PyTorch's growing segments work, from the system's name and the kernel's release."""
    return system == "Linux" and "microsoft" not in release.lower()


def set_gpu_memory_variables() -> None:
    """Set the variables of this process and its children; a user's own settings win."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        supported = growing_segments_supported(platform.system(), platform.release())
        for name in ALLOCATOR_VARIABLES:  # PyTorch 2.9 ignores the first, for this setting
            os.environ[name] = GROWING_SEGMENTS if supported else FREED_BLOCKS


def allocator_setting() -> str:
    """The setting of PyTorch's allocator in this process, or "" for PyTorch's own."""
    return next((os.environ[name] for name in reversed(ALLOCATOR_VARIABLES) if name in os.environ), "")
