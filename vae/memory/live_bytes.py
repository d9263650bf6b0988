"""Counting live bytes and FLOPs while code runs, usually on the meta device or with fake tensors."""

import weakref
from typing import Any

import torch
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
    """

    def __init__(self, kind: str | None = None) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.flops = 0
        # Of each storage: its key, and its bytes, or 0 when it is freed
        self.events: list[tuple[int, int]] = []
        self.largest_features = 0
        self._kind = kind
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
        # without autograd, composite operations arrive whole: conv2d, reshape
        if func.namespace == "aten" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        if func.overloadpacket == torch.ops.aten.convolution:
            self.largest_features = max(self.largest_features, args[0].numel(), result.numel())
        for tensor in _tensors(result):
            self._track(tensor)
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


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
