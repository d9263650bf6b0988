"""What all our operations share: whether they run as Triton kernels, how kernels are launched, and layouts.

An operation is a torch.autograd.Function with a handwritten backward. torch.compile does not trace into it
(vae.training.precision), so the compiler cannot change what the operation saves and what it recomputes.

Memory is counted by running the operations on tensors without data (vae.memory.live_bytes). On these, they
allocate what the GPU path allocates, scratch memory included, and free it as early. On the CPU they may use
temporaries that the GPU does not need.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor


class KernelKey(NamedTuple):
    """The tensors that a set of Triton kernels processes."""

    operation: str
    dtype: torch.dtype


KERNEL_KEYS = tuple(
    KernelKey(operation, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for operation in ("norm", "attention", "feature_distance")
)
REPLACED: set[KernelKey] = set()  # by PyTorch operations, in this process: vae.ops.kernel_check decides

MAX_COMPILED_KERNELS = 10_000  # entries of about 1 KiB
_compiled_kernels: dict[tuple[Any, ...], Any] = {}  # of `launch`


@cache
def triton_is_installed() -> bool:
    """Whether the modules with Triton kernels can be imported."""
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels can run on the device."""
    return device.type == "cuda" and triton_is_installed()


def uses_triton(operation: str, h: torch.Tensor) -> bool:
    """Whether `operation` on h, tokens (B, N, C) or features (B, C, H, W), runs as Triton kernels.

    Features need channels_last layout.
    """
    if h.dtype == torch.float64 or not runs_kernels(h.device) or (h.dim() == 4 and h.is_contiguous()):
        return False
    return not REPLACED or KernelKey(operation, h.dtype) not in REPLACED


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int, *arguments: Any) -> None:
    """Run a Triton kernel on the device of its first argument; `arguments` include its constants.

    What was compiled for equal arguments is launched directly, as in Triton's tutorial "Fused Softmax":
    kernel[grid](...) examines each argument again. The code depends on the values of numbers, on the types of
    pointers, and on which pointers are multiples of 16.
    """
    device = arguments[0].device
    if device.type == "cpu":  # the interpreter
        return kernel[grid](*arguments, num_warps=num_warps)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, num_warps, *arguments)
    seen = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else a for a in arguments]
    key = (kernel.fn, device.index, num_warps, *seen)
    compiled = _compiled_kernels.get(key)
    if compiled is None:
        if len(_compiled_kernels) == MAX_COMPILED_KERNELS:  # images of ever new sizes
            _compiled_kernels.clear()
        compiled = kernel.warmup(*arguments, grid=grid, num_warps=num_warps, enable_fp_fusion=True)
        _compiled_kernels[key] = compiled
    return compiled[(*grid, 1, 1)[:3]](*arguments)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a meta tensor, or a fake tensor, which has the name of a real device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def layout_of(h: torch.Tensor) -> torch.memory_format:
    """The layout of h (B, C, H, W): contiguous_format if h is contiguous, else channels_last."""
    return torch.contiguous_format if h.is_contiguous() else torch.channels_last


def empty_in_layout_of(shape: tuple[int, ...], h: torch.Tensor) -> torch.Tensor:
    """An empty tensor of `shape` with the dtype, device and layout of h."""
    return torch.empty(shape, dtype=h.dtype, device=h.device, memory_format=layout_of(h))


def accumulation_dtype(h: torch.Tensor) -> torch.dtype:
    """The dtype of statistics and sums over h: fp32, or fp64 if h is fp64."""
    return torch.promote_types(h.dtype, torch.float32)


def cast_together(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, like: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The tensors in `dtype` and the layouts of `like`: copied with one launch, or themselves if they fit."""
    layouts = tensors if like is None else like
    pairs = list(zip(tensors, layouts, strict=True))
    results = [
        t if t.dtype == dtype and t.stride() == other.stride() else torch.empty_like(other, dtype=dtype)
        for t, other in pairs
    ]
    new = [(result, t) for result, t in zip(results, tensors, strict=True) if result is not t]
    if new:
        torch._foreach_copy_([result for result, _ in new], [t for _, t in new])
    return results
