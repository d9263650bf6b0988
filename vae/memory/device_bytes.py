"""Counting the bytes alive on one of several devices, among fake tensors that hold nothing."""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from vae.memory.live_bytes import LiveBytes, _inside
from vae.ops.library import IMPLEMENTATIONS


class DeviceBytes(LiveBytes):
    """LiveBytes of what operations create on devices of one kind, "cuda" or "cpu".

    Entered within torch's FakeTensorMode, where tensors may lie on cards that are not there. A copy from one
    device to the other counts on that which it arrives at. FLOPs are not counted.
    """

    def __init__(self, kind: str):
        super().__init__()
        self._kind = kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        here = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.device.type == self._kind]
        if here and func in IMPLEMENTATIONS:  # their scratch memory too
            with _disable_current_modes():
                self.peak = max(self.peak, self.current + _inside(func, args, kwargs)[0])
        for tensor in here:
            self._follow(tensor.untyped_storage())
        return result
