"""The null GPU, launches of Triton kernels, and what libraries and drivers report, in one process."""

import json
from typing import Any

import pytest

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, os
from vae.system.gpus import set_gpu_memory_variables
set_gpu_memory_variables()
import torch
from tests.null_gpu.counters import Counters, peak_bytes, reset_peak, set_limit, used_bytes
from vae.device import is_out_of_memory, pick_device
from vae.ops import library
from vae.ops.attention_triton import row_products, row_products_kernel
from vae.ops.norm import group_norm_silu

os.environ["NULL_GPU_GROWING_SEGMENTS"] = "0"  # the driver refuses them
pick_device("auto")
# ---- libraries without memory, which initialize themselves here
def norm(h):
    return group_norm_silu(h, weight, weight, 4, 1e-6)

def convolution(h):
    return torch.nn.functional.conv2d(h, kernel)

def matrix_product(h):
    return h.flatten(1) @ h.flatten(1).T

def fill_card():
    set_limit(2**40)
    kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    set_limit(used_bytes())  # PyTorch keeps 1 GiB for itself, and nothing is left for others

h = torch.empty(2, 8, 32, 32, device="cuda", memory_format=torch.channels_last)
assert not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
weight, kernel = torch.empty(8, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
found = {"without_memory": []}
for operation in (norm, convolution, matrix_product):
    fill_card()
    try:
        operation(h)
    except RuntimeError as error:
        found["without_memory"].append((str(error), is_out_of_memory(error)))
    torch.cuda.empty_cache()
    operation(h)

# ---- the device itself
set_limit(2**32)
torch.backends.cudnn.benchmark = True
found |= {"name": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
images = torch.rand(2, 3, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
conv = torch.nn.Conv2d(3, 8, 3, padding=1, device="cuda", dtype=torch.bfloat16)
conv(images).sum().backward()  # the search of cuDNN synchronizes
before = Counters.now()
conv(images).sum().backward()
found["step"] = vars(Counters.now().since(before))
images.sum().item()
found["item"] = Counters.now().since(before).synchronizations
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    images + 1
before = Counters.now()
graph.replay()
found["graph"] = Counters.now().since(before).graph_launches
reset_peak()
kept = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
found["peak"] = peak_bytes() / 2**30
try:
    torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    found["error"] = str(error)
del kept

# ---- repeated launches
library._compiled_kernels.clear()
examined, run = [], row_products_kernel.run
def counted(*args, **kwargs):
    examined.append(1)
    return run(*args, **kwargs)
row_products_kernel.run = counted

def launched(a):  # new compiled code, and launches, of two calls
    out = torch.empty(a.shape[:2], device=a.device)
    before, known = Counters.now(), len(examined)
    row_products(a, a, out)
    row_products(a, a, out)
    return len(examined) - known, Counters.now().since(before).launches

buffer = torch.empty(2 * 3 * 64 + 1, device="cuda")
whole, shifted = buffer[:-1].view(2, 3, 64), buffer[1:].view(2, 3, 64)
found["launches"] = [launched(whole), launched(whole), launched(shifted), launched(whole.bfloat16())]
found["launches"].append(launched(whole[:, :, :32].contiguous()))
found["codes"] = len({code.asm["ptx"] for code in library._compiled_kernels.values()})
library.MAX_COMPILED_KERNELS = len(library._compiled_kernels)
launched(whole[:, :2].contiguous())
found["kept"] = len(library._compiled_kernels)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    settings: dict[str, Any] = {"gib": 4, "sm": 90, "workspaces_mib": "64,0"}
    return run_on_null_gpu("-c", PROGRAM, **settings).stdout.splitlines()


@pytest.fixture(scope="module")
def found(printed: list[str]) -> dict[str, Any]:
    return json.loads(printed[-1])


def test_pytorch_runs_on_the_null_gpu(found: dict[str, Any]):
    assert (found["name"], found["capability"]) == ("NVIDIA H100 80GB HBM3", [9, 0])
    assert found["step"]["library_calls"] == 3  # a convolution and its two gradients
    assert found["step"]["synchronizations"] == 0
    assert found["item"] == 1
    assert found["graph"] == 1
    assert 3.0 <= found["peak"] < 3.2
    assert "total capacity of 4.00 GiB" in found["error"]


def test_compiled_code_is_used_for_equal_arguments_only(found: dict[str, Any]):
    assert found["launches"] == [[1, 2], [0, 2], [1, 2], [1, 2], [1, 2]]
    assert found["codes"] == 4  # pointers that are no multiples of 16, another dtype, other rows of a tile
    assert found["kept"] == 1  # the memory of many sizes is limited


def test_libraries_without_memory_and_a_driver_without_growing_segments(printed, found):
    (warning,) = printed[:-1]
    assert warning.startswith("WARNING")
    assert "expandable_segments:True (CUDA driver error" in warning
    messages, recognized = zip(*found["without_memory"], strict=True)
    assert "Triton Error [CUDA]: out of memory" in messages[0]
    assert "CUDNN_STATUS_NOT_INITIALIZED" in messages[1]
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in messages[2]
    assert all(recognized)
