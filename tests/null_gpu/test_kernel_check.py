"""The test of the kernels when a command starts: on the null GPU, every kernel compiles and launches."""

import json

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
BROKEN_LAUNCHES = """
from types import SimpleNamespace
from triton.runtime.jit import JITFunction
from vae.ops import kernel_check

class Broken(dict):
    def get(self, key):
        return super().get(key) and SimpleNamespace(function=0, packed_metadata=0, run=None)

launch = JITFunction.run
def counted(*args, warmup, **kwargs):
    launches.append(1 - warmup)
    assert warmup or broken == "direct"
    return launch(*args, warmup=warmup, **kwargs)
JITFunction.run = counted

for broken in ("direct", "all"):
    launches, library.direct_launches, library._compiled_kernels = [], True, Broken()
    kernel_check._tested.clear()
    kernel_check.choose_kernels("auto", torch.device("cuda", 0), [torch.bfloat16])
    print(json.dumps([sum(launches), library.direct_launches, sorted(map(str, library.REPLACED))]))
"""
KERNELS = {
    "norm_triton": ("moments", "normalize", "sums", "input_gradient", "add"),
    "attention_triton": ("softmax", "gradient", "row_products"),
    "feature_distance_triton": ("distance", "gradient"),
    "rms_norm_triton": ("forward", "backward"),
}


def check_every_kernel(printed: str, dtypes: tuple[str, ...]) -> None:
    """Every kernel has compiled and was launched. The null GPU computes nothing: no result is compared."""
    errors, keys, launched = json.loads(printed)
    assert errors == []
    tested = {getattr(torch, name) for name in dtypes}
    assert keys == sorted(str(key) for key in KERNEL_KEYS if key.dtype in tested)
    assert launched == sorted(f"{module}.{name}_kernel" for module in KERNELS for name in KERNELS[module])


def test_every_kernel_compiles_and_launches_without_bf16():
    """On a card of the RTX 20 series."""
    dtypes = ("float16", "float32")
    check_every_kernel(run_on_null_gpu("-c", PROGRAM, *dtypes, sm=75).stdout, dtypes)


def test_every_kernel_compiles_and_broken_launches_are_replaced():
    """Repeated launches skip code of Triton that another version may need; then Triton fails as well."""
    dtypes = ("bfloat16", "float16", "float32")
    done = run_on_null_gpu("-c", PROGRAM + BROKEN_LAUNCHES, *dtypes, sm=120)
    assert "TRITON_DEFAULT_FP_FUSION" not in done.stderr  # we set it: its default changes
    lines = done.stdout.splitlines()
    check_every_kernel(lines.pop(0), dtypes)
    warnings = [line for line in lines if not line.startswith("[")]
    (launches, direct, replaced), (_, all_direct, all_replaced) = (
        json.loads(line) for line in lines if line.startswith("[")
    )
    assert launches > 2 * 3 * len(KERNELS)  # each kernel, twice, in two dtypes, at least
    assert (direct, replaced) == (False, [])
    assert "Triton itself launches" in warnings[0]
    assert all_direct
    tested = (torch.bfloat16, torch.float32)
    assert all_replaced == sorted(str(key) for key in KERNEL_KEYS if key.dtype in tested)
    assert len(warnings) == 1 + 4  # one for each operation
    assert all("TypeError" in line for line in warnings)
