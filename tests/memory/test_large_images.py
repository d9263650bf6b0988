"""Very large images: one of 3840 px fits a 32 GB card; at 4096 px tensors have 2**31 elements and more."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.default_step import default_spec
from vae.config.options import RECOMPUTE
from vae.memory import plan
from vae.system.host import GIB

# Operations that support tensors of 2**31 elements. Views and empty tensors compute nothing (new_empty
# allocates the norms' small scratch). cuDNN 9.3 and newer use offsets of 64 bits for convolutions
# (github.com/pytorch/pytorch/pull/134890). PyTorch splits the sum with their bias itself until 32 bits
# suffice (TensorIterator). A matrix product counts rows, not elements. Our norm kernels are no PyTorch
# operations: all their offsets have 64 bits, and here they only allocate empty tensors.
VIEWS = {"slice", "expand", "detach", "view", "alias", "permute", "unsqueeze"}
SAFE = VIEWS | {"empty", "new_empty", "empty_like", "baddbmm", "convolution", "convolution_backward"}


class LargeTensors(TorchDispatchMode):
    """PyTorch's operations that get or return a tensor of 2**31 elements or more."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if any(t.numel() >= 2**31 for t in tensors):
            self.found.add(func.overloadpacket.__name__)
        return result


@pytest.mark.slow
def test_3840_px_fit_30_gib():
    """Includes LPIPS, EMA weights, AdamW's moments and the reserve."""
    spec = replace(default_spec(3840), recompute=RECOMPUTE[-1])
    assert plan.step_memory(spec, 1).total <= 29 * GIB
    assert plan.step_memory(replace(spec, batch=4), 1).total <= 29.5 * GIB


@pytest.mark.slow
def test_no_operation_needs_offsets_of_more_than_32_bits():
    plan.count_step.cache_clear()
    with LargeTensors() as large:
        memory = plan.step_memory(replace(default_spec(4096), recompute=RECOMPUTE[-1]), 1)
    assert memory.total <= 33 * GIB
    assert large.found <= SAFE
    assert "baddbmm" in large.found  # operations within our own ones are seen
