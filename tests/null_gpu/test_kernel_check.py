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
    "norm_kernels": ("moments", "normalize", "sums", "input_gradient", "add"),
    "attention_triton": ("softmax", "gradient", "row_products"),
    "feature_distance_triton": ("distance", "gradient"),
}


@pytest.mark.parametrize(
    ("sm", "dtypes"),
    [
        (75, ("float16", "float32")),  # RTX 20: no bf16
        (90, ("bfloat16", "float32")),  # H100
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


BROKEN_RELAUNCH = """
import json, torch
from types import SimpleNamespace
from vae.ops import library
from vae.ops.kernel_check import run_tests

class Broken(dict):
    def get(self, key):
        return super().get(key) and SimpleNamespace(function=0, packed_metadata=0, run=None)

library._compiled_kernels = Broken()
outcomes = list(run_tests(torch.device("cuda", 0), [torch.float32]))
print(json.dumps([outcome.error for outcome in outcomes]))
"""


def test_a_kernel_that_only_launches_once_is_broken():
    """Repeated launches go past Triton's own code, which another version may not support."""
    errors = json.loads(run_on_null_gpu("-c", BROKEN_RELAUNCH).stdout)
    assert len(errors) == 3  # the first kernel of each operation ends its tests
    assert all("TypeError" in error for error in errors)
