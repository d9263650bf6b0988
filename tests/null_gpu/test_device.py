"""The null GPU itself: PyTorch runs on it, memory has a limit, and synchronizations are counted."""

import json

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, torch
from tests.null_gpu.counters import Counters, peak_bytes, reset_peak

torch.backends.cudnn.benchmark = True
found = {"name": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
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
print(json.dumps(found))
"""


def test_pytorch_runs_on_the_null_gpu():
    done = run_on_null_gpu("-c", PROGRAM, gib=4, sm=90, workspaces_mib="64,0")
    found = json.loads(done.stdout)
    assert (found["name"], found["capability"]) == ("NVIDIA H100 80GB HBM3", [9, 0])
    assert found["step"]["library_calls"] == 3  # a convolution and its two gradients
    assert found["step"]["synchronizations"] == 0
    assert found["item"] == 1
    assert found["graph"] == 1
    assert 3.0 <= found["peak"] < 3.2
    assert "total capacity of 4.00 GiB" in found["error"]
