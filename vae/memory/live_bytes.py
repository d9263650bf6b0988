"""Counting live bytes and FLOPs while code runs, usually on the meta device or with fake tensors."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from vae.ops.library import IMPLEMENTATIONS

# Peak bytes and FLOPs of calls already counted: a network often calls an operation with the same shapes.
OPERATION_COUNTS: dict[tuple[Any, ...], tuple[int, int]] = {}


class LiveBytes(TorchDispatchMode):
    """While active, tracks every storage that an operation creates; `peak` is the most bytes alive at once.

    Storages that existed before are not counted. Results on all devices are counted. `flops` sums the
    floating-point operations of matrix products and convolutions. For an operation of vae.ops, both are those
    of its implementation on meta tensors, which allocates what the GPU path allocates (vae.ops.library).
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.flops = 0
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
            self._track(tensor.untyped_storage(), existed_before=True)
        if func in IMPLEMENTATIONS:
            peak, flops = _operation_counts(func, args, kwargs)
            self.peak = max(self.peak, self.current + peak)
            self.flops += flops
        elif func._can_decompose():  # without autograd, composite operations arrive whole: conv2d, reshape
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func not in IMPLEMENTATIONS and func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        for tensor in _tensors(result):
            self._track(tensor.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage, existed_before: bool = False) -> None:
        key = storage._cdata  # an address: another storage may get it as soon as this one is freed
        if key in self._sizes:
            return
        size = 0 if existed_before else storage.nbytes()
        self._sizes[key] = size
        weakref.finalize(storage, self._release, key)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _release(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)


class DeviceBytes(LiveBytes):
    """LiveBytes of storages on devices of one kind, "cuda" or "cpu".

    Enter it within torch's FakeTensorMode, in which tensors may be on devices that do not exist. A copy from
    one device to the other counts on its destination. FLOPs are not counted.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        counted = [tensor for tensor in _tensors(result) if tensor.device.type == self._kind]
        if counted and func in IMPLEMENTATIONS:  # includes their scratch memory
            with _disable_current_modes():
                self.peak = max(self.peak, self.current + _operation_counts(func, args, kwargs)[0])
        for tensor in counted:
            self._track(tensor.untyped_storage())
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _operation_counts(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Peak bytes within one call of an operation of vae.ops, results included, and its FLOPs."""
    leaves, structure = tree_flatten((args, kwargs))
    key = (func, *(_signature(leaf) for leaf in leaves))
    if key not in OPERATION_COUNTS:
        copies = [_meta_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        meta_args, meta_kwargs = tree_unflatten(copies, structure)
        with LiveBytes() as counter:
            result = IMPLEMENTATIONS[func](*meta_args, **meta_kwargs)
        flops = counter.flops
        if func.overloadpacket in flop_registry:  # on meta, a loop over equal blocks may stop early
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        OPERATION_COUNTS[key] = (counter.peak, flops)
    return OPERATION_COUNTS[key]


def _signature(leaf: object) -> object:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _meta_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
