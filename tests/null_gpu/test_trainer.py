"""The real trainer on the null GPU: a discriminator, a CUDA graph, validation, a resume and the export."""

import json
from pathlib import Path

from tests.harness.runs import TINY
from tests.harness.training_runs import last_checkpoint, records
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, sys
from vae.system.gpu_memory import set_gpu_memory_variables
set_gpu_memory_variables()
from vae.training.run import train
for given in json.loads(sys.argv[1]):
    assert train(given) == 0
import torch
assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""
LOSSES = {"adversarial_weight": 0.5, "disc_start": 5, "disc_channels": 8, "disc_layers": 2}
STEPS, STOP = 12, 10  # 3 steps per epoch; the resumed run makes the rest


def test_a_run_and_its_resume(image_folder: Path, tmp_path: Path):
    """In fp16, on a card without bf16; the steps of tests.null_gpu.steps use bf16."""
    folder = tmp_path / "run"
    place = {"output_dir": str(folder), "device": "cuda"}
    options = {**TINY, **LOSSES, **place, "data_path": str(image_folder), "num_epochs": 4}
    options |= {"mixed_precision": True, "recompute": "all", "kernels": "torch"}  # nothing to compile
    runs = [{**options, "max_steps": STOP}, {"resume_from": "latest", "max_steps": STEPS, **place}]
    printed = run_on_null_gpu("-c", PROGRAM, json.dumps(runs), sm=75).stdout
    assert printed.count("RTX 2080 Ti, no profile: settings come from its memory), fp16") == 2
    assert ", CUDA graph: predicted peak" in printed
    checkpoint = last_checkpoint(folder)
    assert (checkpoint["position"]["step"], checkpoint["fp16"]) == (STEPS, True)
    assert [record["step"] for record in records(folder, "validation")] == [0, 3, 6, 9, 10, 12]
    for memory in records(folder, "memory"):
        assert memory["memory_retries"] == 0
        assert 0 < memory["memory_peak_gib"] <= memory["memory_reserved_gib"]
    assert (folder / "vae" / "diffusion_pytorch_model.safetensors").exists()
