"""Counting the bytes alive at once and the arithmetic while code runs, most of all on the meta device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from vae.ops.library import IMPLEMENTATIONS


class LiveBytes(TorchDispatchMode):
    """While entered, follows every storage that an operation creates; `peak` is the most alive at once.

    Storages that existed before are not counted. One device at a time: all results count alike. `flops`
    sums the floating-point operations of matrix products and convolutions. Within an operation of ours
    both are those of its implementation on meta tensors, which is what it takes on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.current = 0
        self.peak = 0
        self.flops = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._follow(value.untyped_storage(), from_outside=True)
        if func in IMPLEMENTATIONS:
            peak, flops = _inside(func, args, kwargs)
            self.peak = max(self.peak, self.current + peak)
            self.flops += flops
        elif func._can_decompose():  # without autograd composite operations arrive whole: conv2d, reshape
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func not in IMPLEMENTATIONS and func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._follow(value.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage, from_outside: bool = False) -> None:
        key = storage._cdata  # an address: free for another storage as soon as this one is gone
        if key in self._known:
            return
        size = 0 if from_outside else storage.nbytes()
        self._known[key] = size
        weakref.finalize(storage, self._release, key)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _release(self, key: int) -> None:
        self.current -= self._known.pop(key, 0)


_COUNTED: dict[tuple, tuple[int, int]] = {}  # a network calls the same operation on the same shapes often


def _inside(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[int, int]:
    """The most bytes alive within one call of an operation of ours, results included, and its arithmetic."""
    leaves, structure = tree_flatten((args, kwargs))
    key = (func, *(_shape(leaf) for leaf in leaves))
    if key not in _COUNTED:
        twins = [_twin(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        twin_args, twin_kwargs = tree_unflatten(twins, structure)
        with LiveBytes() as counter:
            result = IMPLEMENTATIONS[func](*twin_args, **twin_kwargs)
        flops = counter.flops
        if func.overloadpacket in flop_registry:  # a loop over equal blocks may be cut short on meta
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        _COUNTED[key] = (counter.peak, flops)
    return _COUNTED[key]


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
