"""The test of the kernels when a command starts: on the null GPU, every kernel compiles and launches."""

import json

import pytest
import torch

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu
from vae.ops.library import KERNEL_KEYS

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, sys, torch
from vae.ops.kernel_check import run_tests
from vae.ops import library

launched, launch_code = set(), library.launch
def launch(kernel, *rest):
    launch_code(kernel, *rest)
    launched.add(f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}")
library.launch = launch  # before the modules with kernels import it

dtypes = [getattr(torch, name) for name in sys.argv[1:]]
outcomes = list(run_tests(torch.device("cuda", 0), dtypes))
errors = [str(outcome) for outcome in outcomes if outcome.error]
print(json.dumps([errors, sorted({str(outcome.key) for outcome in outcomes}), sorted(launched)]))
"""
KERNELS = {
    "norm_triton": ("moments", "normalize", "sums", "input_gradient", "add"),
    "attention_triton": ("softmax", "gradient", "row_products"),
    "feature_distance_triton": ("distance", "gradient"),
    "rms_norm_triton": ("forward", "backward"),
}


@pytest.mark.parametrize(
    ("sm", "dtypes"),
    [
        (75, ("float16", "float32")),  # RTX 20: no bf16
        (120, ("bfloat16", "float16", "float32")),  # RTX 50
    ],
)
def test_every_kernel_compiles_and_launches(sm: int, dtypes: tuple[str, ...]):
    """The null GPU computes nothing, so results are not compared."""
    done = run_on_null_gpu("-c", PROGRAM, *dtypes, sm=sm)
    errors, keys, launched = json.loads(done.stdout)
    assert errors == []
    tested = {getattr(torch, name) for name in dtypes}
    assert keys == sorted(str(key) for key in KERNEL_KEYS if key.dtype in tested)
    assert "TRITON_DEFAULT_FP_FUSION" not in done.stderr  # we set it: its default changes
    assert launched == sorted(f"{module}.{name}_kernel" for module in KERNELS for name in KERNELS[module])


BROKEN_LAUNCHES = """
import json, sys, torch
from types import SimpleNamespace
from triton.runtime.jit import JITFunction
from vae.ops import library
from vae.ops.kernel_check import choose_kernels

class Broken(dict):
    def get(self, key):
        return super().get(key) and SimpleNamespace(function=0, packed_metadata=0, run=None)

library._compiled_kernels, launch = Broken(), JITFunction.run
def counted(*args, warmup, **kwargs):
    launches.append(1 - warmup)
    assert warmup or sys.argv[1] == "direct"
    return launch(*args, warmup=warmup, **kwargs)
JITFunction.run, launches = counted, []

choose_kernels("auto", torch.device("cuda", 0), [torch.bfloat16])
print(json.dumps([sum(launches), library.direct_launches, sorted(map(str, library.REPLACED))]))
"""


def test_triton_itself_launches_if_direct_launches_fail():
    """Repeated launches go past Triton's own code, which another version may not support."""
    *warnings, last = run_on_null_gpu("-c", BROKEN_LAUNCHES, "direct").stdout.splitlines()
    launches, direct, replaced = json.loads(last)
    assert launches > 2 * 3 * len(KERNELS)  # each kernel, twice, in two dtypes, at least
    assert (direct, replaced) == (False, [])
    assert len(warnings) == 1
    assert "TypeError" in warnings[0]
    assert "Triton itself launches" in warnings[0]


def test_kernels_that_cannot_be_launched_twice_are_replaced():
    *warnings, last = run_on_null_gpu("-c", BROKEN_LAUNCHES, "all").stdout.splitlines()
    _, direct, replaced = json.loads(last)
    assert direct
    tested = (torch.bfloat16, torch.float32)
    assert replaced == sorted(str(key) for key in KERNEL_KEYS if key.dtype in tested)
    assert len(warnings) == 4  # one for each operation
    assert all("TypeError" in line for line in warnings)
