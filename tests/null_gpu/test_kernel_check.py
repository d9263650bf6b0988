"""The test of the kernels when a command starts: on the null GPU, every kernel compiles and launches."""

import json

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu
from vae.ops.library import KERNEL_KEYS

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, torch
from vae.ops.kernel_check import run_tests
from vae.ops import library

launched, launch_code = set(), library.launch
def launch(kernel, *rest):
    launch_code(kernel, *rest)
    launched.add(f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}")
library.launch = launch  # before the modules with kernels import it

outcomes = list(run_tests(torch.device("cuda", 0), (torch.bfloat16, torch.float16, torch.float32)))
errors = [str(outcome) for outcome in outcomes if outcome.error]
print(json.dumps([errors, sorted({str(outcome.key) for outcome in outcomes}), sorted(launched)]))
"""
KERNELS = {
    "norm_kernels": ("moments", "normalize", "sums", "input_gradient", "add"),
    "attention_triton": ("softmax", "gradient", "row_products"),
    "feature_distance_triton": ("distance", "gradient"),
}


def test_every_kernel_compiles_and_launches():
    """In each dtype and layout. The null GPU computes nothing, so results are not compared."""
    errors, keys, launched = json.loads(run_on_null_gpu("-c", PROGRAM).stdout)
    assert errors == []
    assert keys == sorted(str(key) for key in KERNEL_KEYS)
    assert launched == sorted(f"{module}.{name}_kernel" for module in KERNELS for name in KERNELS[module])
