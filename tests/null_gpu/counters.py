"""Reads the counters of the null GPU, in a process that runs on it."""

import ctypes
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True)
class Counters:
    """Counts since the process started."""

    launches: int  # of kernels, not counting those within a CUDA graph
    library_calls: int  # convolutions and matrix products
    copies: int
    memsets: int
    synchronizations: int
    graph_launches: int
    failed_allocations: int
    collectives: int

    @classmethod
    def now(cls) -> "Counters":
        return cls(*(ctypes.c_long * len(fields(cls))).in_dll(ctypes.CDLL(None), "null_gpu_counters"))

    def since(self, before: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def used_bytes() -> int:
    """The memory that is in use on the card, of all libraries."""
    return _size("null_gpu_used").value


def peak_bytes() -> int:
    """The most memory that was in use on the card since `reset_peak`."""
    return _size("null_gpu_peak").value


def reset_peak() -> None:
    _size("null_gpu_peak").value = used_bytes()


def set_limit(bytes_: int) -> None:
    """Change the memory of the card, for allocations from now on."""
    _size("null_gpu_limit").value = bytes_


def _size(name: str) -> ctypes.c_size_t:
    return ctypes.c_size_t.in_dll(ctypes.CDLL(None), name)
