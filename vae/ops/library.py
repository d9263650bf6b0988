"""Shared by all operations: the choice between PyTorch and Triton, launches of kernels, and layouts.

An operation is a torch.autograd.Function with a handwritten backward. torch.compile does not trace into it
(vae.training.precision), so the compiler cannot change what the operation saves and what it recomputes.

Memory is counted by running the operations on tensors without data (vae.memory.live_bytes). On these, they
allocate what the GPU path allocates, scratch memory included, and free it as early. On the CPU they may use
temporaries that the GPU does not need.

Launch shapes, how kernels cut a tensor, are plain arithmetic, so memory can be counted and the shapes tested
without Triton and without a GPU.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

# 4096 elements on 8 warps are 16 per thread: in bf16 two loads of 16 bytes, the widest loads.
TILE_ELEMENTS = 4096
NUM_WARPS = 8

# Programs of a reduction, along pixels, blocks of channels and images: as many as run at once, so none waits
# for another to end. With 128 registers for each of 256 threads, two fill the 65,536 registers of a
# streaming multiprocessor; each keeps two tiles in flight, 32 KiB in bf16 for each multiprocessor, and an
# H200 (4.8 TB/s, 132 multiprocessors, about 0.7 µs) needs 25. Few programs also keep the partial results
# small, which each program of a second kernel reads again. Not measured yet.
PROGRAMS_PER_PROCESSOR = 2
MAX_REGISTERS = 65_536 // (PROGRAMS_PER_PROCESSOR * 32 * NUM_WARPS)
PROCESSORS = 170  # of an RTX 5090, for tensors without a card
REDUCTION_PROGRAMS: int | None = None  # instead of those: benchmarks and tests set it

# Consecutive channels of a tile: 128 in bf16 are 256 bytes, two full transactions.
COLUMNS = 128

# The widest features of the RMS kernels, whose tiles have all channels of a pixel: two tiles of two tensors
# in fp32 are then 64 KiB.
MAX_RMS_CHANNELS = TILE_ELEMENTS

# At least a part of a row of attention scores: 2048 of them on 4 warps.
ROW_TILE_ELEMENTS = 2048


class KernelKey(NamedTuple):
    """The tensors that a set of Triton kernels processes."""

    operation: str
    dtype: torch.dtype


KERNEL_KEYS = tuple(
    KernelKey(operation, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for operation in ("norm", "attention", "feature_distance", "rms_norm")
)
REPLACED: set[KernelKey] = set()  # by PyTorch operations, in this process: vae.ops.kernel_check decides
direct_launches = True  # of compiled kernels, see `launch`: vae.ops.kernel_check decides, for this process

MAX_COMPILED_KERNELS = 10_000  # entries of about 1 KiB
_compiled_kernels: dict[tuple[Any, ...], Any] = {}  # of `launch`


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a CUDA device; for a CPU, below 0, those of an RTX 5090."""
    return PROCESSORS if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


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


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    num_warps: int,
    tensors: Sequence[torch.Tensor | None],
    numbers: tuple[Any, ...],
    max_registers: int | None = None,
) -> None:
    """Run a Triton kernel on the device of its first tensor; constants are the last of `numbers`.

    `max_registers` of a thread: so many that a multiprocessor holds the programs that its grid counts on.

    What was compiled for equal arguments is launched directly, as in Triton's tutorial "Fused Softmax":
    kernel[grid](...) examines each argument again. The code depends on the values of numbers, on the types of
    pointers, and on which pointers are multiples of 16. If `direct_launches` is false, kernel[grid](...) does
    all this, which every version of Triton offers.
    """
    first = tensors[0]
    assert first is not None
    index = first.get_device()
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            launch(kernel, grid, num_warps, tensors, numbers, max_registers)
        return
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": True}
    if max_registers and torch.version.cuda:  # only NVIDIA's compiler has the option
        options["maxnreg"] = max_registers
    if index < 0 or not direct_launches:  # index < 0: the interpreter, on the CPU
        kernel[grid](*tensors, *numbers, **options)
        return
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    types = [None if tensor is None else tensor.dtype for tensor in tensors]
    aligned = [pointer is None or pointer % 16 == 0 for pointer in pointers]
    key = (kernel.fn, index, num_warps, numbers, *types, *aligned)
    compiled = _compiled_kernels.get(key)
    if compiled is None:
        if len(_compiled_kernels) == MAX_COMPILED_KERNELS:  # images of ever new sizes
            _compiled_kernels.clear()
        compiled = kernel.warmup(*tensors, *numbers, grid=grid, **options)
        compiled[grid](*tensors, *numbers)  # also loads the code, for which memory may be missing
        _compiled_kernels[key] = compiled
        return
    # What compiled[grid](*tensors, *numbers) calls, without hooks, and with addresses: Triton would ask each
    # tensor for its address, and the driver about each address.
    stream, no_hooks = torch._C._cuda_getCurrentRawStream(index), (None, None, None)
    code = compiled.function, compiled.packed_metadata
    compiled.run(*grid, stream, *code, *no_hooks, *pointers, *numbers)


def kernel_module(name: str) -> ModuleType:
    """The module with kernels of this name; importlib's own look-up costs as much as a launch."""
    return sys.modules.get(name) or importlib.import_module(name)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decorator, whose preparations are left out if no graph of the gradients is built."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def call(*arguments: Any) -> Any:
        return guarded(*arguments) if torch.is_grad_enabled() else backward(*arguments)

    return call


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
    results, copies, sources = [], [], []
    for tensor, other in zip(tensors, like or tensors, strict=True):
        result = tensor
        if tensor.dtype != dtype or tensor.stride() != other.stride():
            result = torch.empty_like(other, dtype=dtype)
            copies.append(result)
            sources.append(tensor)
        results.append(result)
    if copies:
        torch._foreach_copy_(copies, sources)
    return results


# ---- Launch shapes ---------------------------------------------------------------------------------------


class NormBlocks(NamedTuple):
    """The tiles (pixels, channels) of each image for norm kernels, and the program of each tile."""

    rows: int  # pixels of a tile, a power of two
    columns: int  # at least `channels`, a power of two
    channels: int  # of a tile: whole groups
    groups: int  # at least the groups of a tile, a power of two
    column_blocks: int
    tiles: int  # tiles of one image along its pixels
    tiles_per_program: int
    programs: int  # along the pixels: the number of partial results per image


def reduction_programs(processors: int = PROCESSORS) -> int:
    """Programs of a reduction on a card with this number of streaming multiprocessors."""
    return REDUCTION_PROGRAMS or PROGRAMS_PER_PROCESSOR * processors


def norm_blocks(batch: int, channels: int, pixels: int, groups: int, total: int) -> NormBlocks:
    """Tiles of TILE_ELEMENTS with whole groups; about `total` programs."""
    group_channels = channels // groups
    own = min(groups, max(1, COLUMNS // group_channels))
    aligned = 8 // math.gcd(8, group_channels)  # groups whose channels fill loads of 16 bytes in bf16
    own = own // aligned * aligned or own
    columns = power_of_two(own * group_channels)
    rows = max(1, min(TILE_ELEMENTS // columns, max(16, power_of_two(pixels))))
    column_blocks, tiles = -(-groups // own), -(-pixels // rows)
    wanted = max(1, total // (batch * column_blocks))
    tiles_per_program = -(-tiles // wanted)
    programs = -(-tiles // tiles_per_program)
    sizes = (own * group_channels, power_of_two(own), column_blocks, tiles, tiles_per_program, programs)
    return NormBlocks(rows, columns, *sizes)


class RmsBlocks(NamedTuple):
    """The tiles (pixels, channels) for RMS kernels, and the program of each tile in backward."""

    rows: int  # pixels of a tile, a power of two
    columns: int  # at least the channels, a power of two
    tiles: int
    tiles_per_program: int
    programs: int  # of backward: the number of partial sums


def rms_blocks(channels: int, pixels: int, most: int) -> RmsBlocks:
    """Tiles of TILE_ELEMENTS, or one pixel; at most `most` programs. `pixels`: of all images."""
    columns = power_of_two(channels)
    rows = max(1, TILE_ELEMENTS // columns)
    tiles = -(-pixels // rows)
    tiles_per_program = -(-tiles // most)
    return RmsBlocks(rows, columns, tiles, tiles_per_program, -(-tiles // tiles_per_program))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


class RowTile(NamedTuple):
    """Whole rows of a matrix that one program processes at once."""

    rows: int  # a power of two
    columns: int  # a power of two, at least the matrix's width
    num_warps: int


def row_tile(columns: int) -> RowTile:
    """2048 elements or one row, 16 elements per thread; at most 32 warps for one long row."""
    padded = power_of_two(columns)
    rows = max(1, ROW_TILE_ELEMENTS // padded)
    return RowTile(rows, padded, num_warps=max(1, min(32, rows * padded // (16 * 32))))
