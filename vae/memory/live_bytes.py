"""Counting the bytes alive at once while code runs, most of all on the meta device, where it is exact."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, follows every storage that an operation creates; `peak` is the most alive at once.

    Storages that existed before are not counted. One device at a time: all results count alike.
    """

    def __init__(self):
        super().__init__()
        self.current = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._follow(value.untyped_storage(), from_outside=True)
        result = func(*args, **(kwargs or {}))
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
