"""CUDA's autocast and attention on the meta device, to count the memory of diffusers' step there.

Autocast does not support meta tensors. On meta tensors, their attention would allocate the whole score
matrix, but the CUDA kernel does not; and PyTorch's meta implementation of this kernel omits the scratch
buffers of its launcher. The lists are those in PyTorch's documentation of automatic mixed precision, as far
as this model and LPIPS need them; tests compare them with PyTorch's autocast.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TO_BF16 = {torch.conv2d, F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm}
TO_FP32 = {F.group_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.exp, Tensor.exp, F.l1_loss, F.softmax}
SUM_IN_FP32 = {torch.sum, Tensor.sum}

# The backward of the memory-efficient kernel as PyTorch launches it for heads wider than 128, from compute
# capability 8.0 on: tiles of 128 queries by 64 keys, and a maximum number of splits of the keys. Source:
# attention_backward.cu and mem_eff_attention/kernel_backward.h of aten/src/ATen/native/transformers/cuda.
TILE_KEYS = 64
MOST_KEY_SPLITS = 200
WIDE_HEAD = 128


class CudaRules(TorchFunctionMode):
    """Inside this mode, operations use CUDA's attention and, if requested, the dtypes of bf16 autocast."""

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
        if dtype == torch.bfloat16 and value.is_leaf and value.requires_grad:  # autocast caches these
            if id(value) not in self._cast_weights:
                self._cast_weights[id(value)] = value.to(dtype)
            return self._cast_weights[id(value)]
        return value.to(dtype)

    def __exit__(self, *exception: Any) -> None:
        self._cast_weights.clear()
        super().__exit__(*exception)


class MemoryEfficientAttention(torch.autograd.Function):
    """CUDA's kernel for wide heads on meta tensors, with the scratch buffers of its backward."""

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
    """Bytes that the launcher of the backward allocates besides the three gradients; as many keys as queries.

    These are the gradient of the queries in fp32, because tiles of keys are added to it. For dtypes below
    fp32 and wide heads, there are also gradients of keys and values: one tile per split of the keys.
    """
    batch, heads, tokens, width = query.shape
    elements = batch * heads * tokens * width
    if query.dtype != torch.float32 and width > WIDE_HEAD:
        splits = min(-(-tokens // TILE_KEYS), max(1, MOST_KEY_SPLITS // (batch * heads)))
        elements += batch * heads * 2 * splits * TILE_KEYS * width
    return 4 * elements
