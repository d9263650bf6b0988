"""Counting live bytes and FLOPs while code runs, usually on the meta device or with fake tensors.

And what PyTorch's allocator reserves for these tensors on a card, with expandable segments.
"""

import bisect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class LiveBytes(TorchDispatchMode):
    """While active, tracks every storage that an operation creates; `peak` is the most bytes alive at once.

    Storages that existed before are not counted. `flops` sums the floating-point operations of matrix
    products and convolutions. `largest_features` is the number of elements of the largest input or result of
    a convolution. On tensors without data, the operations of vae.ops allocate what the GPU path allocates.

    `kind`: count only storages on devices of this kind, "cuda" or "cpu". Enter it within torch's
    FakeTensorMode, in which tensors may be on devices that do not exist. A copy from one device to the other
    counts on its destination.

    `within_kernels`: also count what kernels of a card allocate besides their results: copies of another
    memory layout. The operations of vae.ops have the layouts on a card only, and need no copies.
    """

    def __init__(self, kind: str | None = None, within_kernels: bool = False) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.flops = 0
        # Of each storage: its key, and its bytes, or 0 when it is freed
        self.events: list[tuple[int, int]] = []
        self.largest_features = 0
        self._kind = kind
        self._within_kernels = within_kernels
        self._sizes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._track(tensor, existed_before=True)
        # without autograd, composite operations arrive whole: conv2d, reshape; not silu_backward, which has a
        # kernel on real devices
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if func.namespace == "aten" and func._can_decompose() and not has_kernel(func.name(), "CPU"):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        if func.overloadpacket == torch.ops.aten.convolution:
            self.largest_features = max(self.largest_features, args[0].numel(), result.numel())
        for tensor in _tensors(result):
            self._track(tensor)
        if self._within_kernels and (size := _bytes_within(func.overloadpacket, args)):
            self.events += [(-1, size), (-1, 0)]  # no storage has this key
            self.peak = max(self.peak, self.current + size)
        return result

    def _track(self, tensor: torch.Tensor, existed_before: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # an address: another storage may get it as soon as this one is freed
        if key in self._sizes:
            return
        counts = not existed_before and self._kind in (None, tensor.device.type)
        size = storage.nbytes() if counts else 0
        self._sizes[key] = size
        weakref.finalize(storage, self._release, key)
        if size:
            self.events.append((key, size))
        self.current += size
        self.peak = max(self.peak, self.current)

    def _release(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        if size:
            self.events.append((key, 0))
        self.current -= size


def _bytes_within(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a kernel of a card allocates besides its results.

    A convolution of cuDNN copies features whose memory layout is not that of the weights. Its backward copies
    the gradient into the layout of the weights, and then back into that of the features
    (aten/src/ATen/native/Convolution.cpp, cudnn/ConvShared.cpp). The backward of softmax multiplies both of
    its inputs first (cuda/SoftMax.cu).
    """
    aten = torch.ops.aten
    if func == aten._softmax_backward_data:
        return int(args[0].nbytes)
    if func not in (aten.convolution, aten.convolution_backward):
        return 0
    *gradient, features, weight = args[: 2 if func == aten.convolution else 3]
    layouts = [suggest_memory_format(tensor) for tensor in (features, weight)]
    layout = max(layouts, key=lambda layout: layout != torch.contiguous_format)
    if layouts[0] != layout:
        return int(2 * gradient[0].nbytes if gradient else features.nbytes)
    return sum(t.nbytes for t in gradient if not t.is_contiguous(memory_format=layout))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# ---- how the allocator places what a step allocates --------------------------------------------------------
# It takes memory from the driver in pages, at the end of one address range for small and of one for large
# tensors, and places a tensor into the smallest gap that it fits into. Gaps that no tensor fits into remain:
# 1 % of the peak without recomputation, up to a fifth with it. c10/cuda/CUDACachingAllocator.cpp in PyTorch.

MIB = 2**20
CUBLAS_WORKSPACE = 32 * MIB  # PyTorch takes it on Hopper and Blackwell, and 8 MiB on other cards
CUDNN_WORKSPACE = 164 * MIB  # at most, of its first choices (benchmarks/LOG.md)
ALIGNMENT = 512
SMALL, SMALL_PAGE, LARGE_PAGE = MIB, 2 * MIB, 20 * MIB  # kSmallSize, kSmallBuffer, kLargeBuffer

Event = tuple[int, int]  # a key of a storage, and its bytes when it is created or 0 when it is freed


class AddressRange:
    """An expandable segment: allocations and the gaps between them. Nothing in it is given back."""

    def __init__(self, page: int) -> None:
        self.mapped = 0  # bytes that are reserved, from the start of the range
        self._page = page
        self._gaps: list[tuple[int, int]] = []  # (size, start), sorted
        self._size_from: dict[int, int] = {}  # the size of each gap, by its start
        self._start_to: dict[int, int] = {}  # by its end

    def allocate(self, size: int) -> int:
        """The start of `size` bytes in the smallest gap that fits, or at the end, which can grow."""
        index = bisect.bisect_left(self._gaps, (size, 0))
        while index < len(self._gaps) and sum(self._gaps[index]) == self.mapped:
            index += 1
        start = (
            self._gaps[index][1] if index < len(self._gaps) else self._start_to.get(self.mapped, self.mapped)
        )
        size_there = self._take(start) if start in self._size_from else 0
        if size_there < size:
            more = -(-(size - size_there) // self._page) * self._page
            self.mapped += more
            size_there += more
        if size_there > size:
            self._add(start + size, size_there - size)
        return start

    def free(self, start: int, size: int) -> None:
        """Free bytes, and join them with the gaps on both sides."""
        if start + size in self._size_from:
            size += self._take(start + size)
        if start in self._start_to:
            before = self._start_to[start]
            size += self._take(before)
            start = before
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._gaps, (size, start))
        self._size_from[start] = size
        self._start_to[start + size] = start

    def _take(self, start: int) -> int:
        size = self._size_from.pop(start)
        del self._start_to[start + size]
        del self._gaps[bisect.bisect_left(self._gaps, (size, start))]
        return size


class Allocator:
    """The two address ranges, and the storages in them by key."""

    def __init__(self) -> None:
        self._small, self._large = AddressRange(SMALL_PAGE), AddressRange(LARGE_PAGE)
        self._live: dict[int, tuple[AddressRange, int, int]] = {}

    @property
    def reserved(self) -> int:
        """Bytes that have been taken from the driver."""
        return self._small.mapped + self._large.mapped

    def allocate(self, size: int) -> tuple[AddressRange, int, int]:
        """Range, start and rounded size of a new storage."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        part = self._small if size <= SMALL else self._large
        return part, part.allocate(size), size

    def replay(self, events: Iterable[Event]) -> None:
        """Create and free storages."""
        for key, size in events:
            if size:
                self._live[key] = self.allocate(size)
            else:
                part, *place = self._live.pop(key)
                part.free(*place)


def reserved_bytes(events: list[Event], resident: int, moments: int) -> int:
    """Bytes that are reserved after two steps with these events; `resident` bytes stay between steps.

    The first update creates `moments` tensors for each gradient, in gaps between the gradients. The next step
    frees the gradients first.
    """
    gradients: dict[int, int] = {}
    for key, size in events:
        if size:
            gradients[key] = size
        else:
            del gradients[key]
    allocator = Allocator()
    allocator.allocate(CUBLAS_WORKSPACE)
    allocator.allocate(max(ALIGNMENT, resident - moments * sum(gradients.values())))
    allocator.replay(events)
    for size in [*gradients.values()] * moments:
        allocator.allocate(size)
    allocator.replay((key, 0) for key in gradients)
    allocator.replay(events)
    return allocator.reserved + CUDNN_WORKSPACE  # no gap fits a peak within a convolution
