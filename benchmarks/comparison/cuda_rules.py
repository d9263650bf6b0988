"""CUDA's choices on the meta device, so that diffusers' step can be counted there: autocast and attention.

Autocast knows no meta tensors, and their attention on them would hold the whole score matrix, which the CUDA
kernel does not; what that kernel's launcher allocates besides its results is not known to PyTorch's meta form
of it. The lists are those of PyTorch's page on automatic mixed precision, as far as this model and LPIPS meet
them; tests hold them against PyTorch's own autocast.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TO_BF16 = {torch.conv2d, F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm}
TO_FP32 = {F.group_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.exp, Tensor.exp, F.l1_loss, F.softmax}
SUM_IN_FP32 = {torch.sum, Tensor.sum}

# The memory-efficient kernel's backward as PyTorch launches it for heads wider than 128, from compute
# capability 8.0 on: tiles of 128 queries by 64 keys, at most so many splits of the keys in all. Source:
# attention_backward.cu and mem_eff_attention/kernel_backward.h of aten/src/ATen/native/transformers/cuda.
TILE_KEYS = 64
MOST_KEY_SPLITS = 200
WIDE_HEAD = 128


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
            return MemoryEfficientAttention.apply(*args[:3])
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


class MemoryEfficientAttention(torch.autograd.Function):
    """CUDA's kernel for wide heads on meta tensors, with the scratch that its backward is launched with."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, heads, N, C) each and back."""
        forward = torch.ops.aten._scaled_dot_product_efficient_attention
        results = forward(query, key, value, None, compute_log_sumexp=True)
        ctx.save_for_backward(query, key, value, *results)
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *results = ctx.saved_tensors
        scratch = torch.empty(backward_scratch_bytes(query), dtype=torch.uint8, device="meta")
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        grads = backward(grad, query, key, value, None, *results, 0.0, wanted)[:3]
        del scratch
        return grads


def backward_scratch_bytes(query: Tensor) -> int:
    """What the launcher of the backward allocates besides the three gradients, for as many keys as queries.

    The gradient of the queries in fp32, as tiles of keys add to it; below fp32, for wide heads, also those of
    the keys and values that are in work, one tile for each split of the keys.
    """
    batch, heads, tokens, width = query.shape
    elements = batch * heads * tokens * width
    if query.dtype != torch.float32 and width > WIDE_HEAD:
        splits = min(-(-tokens // TILE_KEYS), max(1, MOST_KEY_SPLITS // (batch * heads)))
        elements += batch * heads * 2 * splits * TILE_KEYS * width
    return 4 * elements
