"""CUDA's choices on the meta device, so that diffusers' step can be counted there: autocast and attention.

Autocast knows no meta tensors, and their attention on them would hold the whole score matrix, which the CUDA
kernel does not. The lists are those of PyTorch's page on automatic mixed precision, as far as this model and
LPIPS meet them; tests hold them against PyTorch's own autocast.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TO_BF16 = {torch.conv2d, F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm}
TO_FP32 = {F.group_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.exp, Tensor.exp, F.l1_loss, F.softmax}
SUM_IN_FP32 = {torch.sum, Tensor.sum}


class CudaRules(TorchFunctionMode):
    """While entered, operations take CUDA's attention and, where asked for, bf16 autocast's dtypes."""

    def __init__(self, autocast: bool):
        super().__init__()
        self.autocast = autocast
        self._cast_weights: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        if self.autocast:
            if func in TO_BF16 or attends:
                args, kwargs = self._cast(args, kwargs, torch.bfloat16)
            elif func in TO_FP32:
                args, kwargs = self._cast(args, kwargs, torch.float32)
            elif func in SUM_IN_FP32 and args[0].is_floating_point():
                kwargs = {"dtype": torch.float32, **kwargs}
        if attends:
            query, key, value = args[:3]  # (B, heads, N, C)
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            return efficient(query, key, value, None, compute_log_sumexp=True)[0]
        return func(*args, **kwargs)

    def _cast(self, args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict]:
        return tuple(self._one(value, dtype) for value in args), {
            name: self._one(value, dtype) for name, value in kwargs.items()
        }

    def _one(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if dtype == torch.bfloat16 and value.is_leaf and value.requires_grad:  # autocast keeps these
            if id(value) not in self._cast_weights:
                self._cast_weights[id(value)] = value.to(dtype)
            return self._cast_weights[id(value)]
        return value.to(dtype)

    def __exit__(self, *exception: Any) -> None:
        self._cast_weights.clear()
        super().__exit__(*exception)
