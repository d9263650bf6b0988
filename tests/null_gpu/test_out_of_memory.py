"""What drivers and libraries say: no growing segments; no memory for what is not allocated by PyTorch."""

import json

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, os
from vae.system.gpus import set_gpu_memory_variables
set_gpu_memory_variables()
import torch
from tests.null_gpu.counters import set_limit, used_bytes
from vae.device import is_out_of_memory, pick_device
from vae.ops.norm import group_norm_silu

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

os.environ["NULL_GPU_GROWING_SEGMENTS"] = "0"  # the driver refuses them
pick_device("auto")
h = torch.empty(2, 8, 32, 32, device="cuda", memory_format=torch.channels_last)
assert not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
weight, kernel = torch.empty(8, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
for operation in (norm, convolution, matrix_product):
    fill_card()
    try:
        operation(h)
    except RuntimeError as error:
        message, recognized = str(error), is_out_of_memory(error)
    torch.cuda.empty_cache()
    operation(h)
    print(json.dumps([message, recognized]))
"""


def test_libraries_without_memory_and_a_driver_without_growing_segments():
    warning, *printed = run_on_null_gpu("-c", PROGRAM).stdout.splitlines()
    assert warning.startswith("WARNING")
    assert "expandable_segments:True (CUDA driver error" in warning
    messages, recognized = zip(*map(json.loads, printed), strict=True)
    assert "Triton Error [CUDA]: out of memory" in messages[0]
    assert "CUDNN_STATUS_NOT_INITIALIZED" in messages[1]
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in messages[2]
    assert all(recognized)
