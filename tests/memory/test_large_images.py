"""One image of 4096 px: the step fits a 32 GB card, and no convolution gets 2**31 elements."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vae.config.options import RECOMPUTE
from vae.memory import live_bytes, plan
from vae.memory.plan import choose_step
from vae.memory.recompute_table import default_spec
from vae.ops.library import IMPLEMENTATIONS
from vae.system.host import GIB

SPEC = default_spec(4096)

# Operations that support tensors of 2**31 elements. Views and empty tensors compute nothing (new_empty
# allocates the norms' small scratch). PyTorch splits the sum of two tensors itself until 32 bits suffice
# (TensorIterator). Our norm kernels are no PyTorch operations: all their offsets have 64 bits, and here they
# only allocate empty tensors.
VIEWS = {"slice", "as_strided", "detach", "view", "alias", "permute"}
SAFE = VIEWS | {"empty", "new_empty", "empty_like", "empty_strided", "add_"}


class LargeTensors(TorchDispatchMode):
    """PyTorch's operations that get or return a tensor of 2**31 elements or more."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if func not in IMPLEMENTATIONS and any(t.numel() >= 2**31 for t in tensors):
            self.found.add(func.overloadpacket.__name__)
        return result


@pytest.fixture(scope="module")
def chosen():
    return choose_step(SPEC, 30 * GIB, "auto", "auto")


def test_step_fits_30_gib(chosen):
    """Includes LPIPS, EMA weights, AdamW's moments and the reserve."""
    assert chosen.recompute == RECOMPUTE[-1]  # the last one that auto tries
    assert chosen.total <= 29.5 * GIB
    assert chosen.flops <= 2_240e12


def test_four_images_in_four_passes_fit_30_gib():
    assert plan.step_memory(replace(SPEC, batch=4, recompute=RECOMPUTE[-1]), 1).total <= 30 * GIB


def test_no_operation_needs_offsets_of_more_than_32_bits(monkeypatch):
    monkeypatch.setattr(live_bytes, "OPERATION_COUNTS", {})  # count every operation again
    plan.count_step.cache_clear()
    with LargeTensors() as large:
        plan.step_memory(replace(SPEC, recompute=RECOMPUTE[-1]), 1)
    assert large.found <= SAFE
    assert "add_" in large.found  # operations within our own ones are seen
