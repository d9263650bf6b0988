"""The real trainer on the null GPU: a discriminator, a CUDA graph, validation, a resume and the export."""

import json
from pathlib import Path

from tests.harness.image_kinds import write_noise
from tests.harness.runs import TINY
from tests.harness.training_runs import last_checkpoint, records
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, sys
from vae.system.gpus import set_gpu_memory_variables
set_gpu_memory_variables()
from vae.training.run import train
for given in json.loads(sys.argv[1]):
    assert train(given) == 0
import torch
assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""
LOSSES = {"adversarial_weight": 0.5, "disc_start": 5, "disc_warmup": 0, "disc_channels": 8, "disc_layers": 2}
TWO_STAGES = """
import contextlib, gc, json, sys
from vae.system.gpus import set_gpu_memory_variables
set_gpu_memory_variables()
from vae.system.errors import NonFiniteError
from vae.training.run import train
gc.disable()  # a reference cycle keeps what it refers to
with contextlib.suppress(NonFiniteError):  # nothing is computed, so the export may refuse the weights
    train(json.loads(sys.argv[1]))
"""
WITH_AND_WITHOUT_GRAPH = """
import json, sys
from vae.system.gpus import set_gpu_memory_variables
set_gpu_memory_variables()
from vae.training import cuda_graph
from vae.training.run import train
record, captures = cuda_graph.record, []
def counted(compute):
    captures.append(None)
    return record(compute)
cuda_graph.record = counted
for given in json.loads(sys.argv[1]):
    assert train(given) == 0
print(f"{len(captures)} captures")
"""
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
    assert ", CUDA graph" in printed
    checkpoint = last_checkpoint(folder)
    assert (checkpoint["position"]["step"], checkpoint["fp16"]) == (STEPS, True)
    # step 5: the validation with which the adversarial phase begins
    assert [record["step"] for record in records(folder, "validation")] == [0, 3, 5, 6, 9, 10, 12]
    for memory in records(folder, "memory"):
        assert memory["memory_retries"] == 0
        assert 0 < memory["memory_peak_gib"] <= memory["memory_reserved_gib"]
    assert (folder / "vae" / "diffusion_pytorch_model.safetensors").exists()


def test_a_cuda_graph_ends_with_its_stage(tmp_path: Path):
    """The steps of the second stage fill the card, so they need the memory of the first stage's graph."""
    write_noise(tmp_path / "images", 8, 512, 512)
    given = {**TINY, "channels": [64, 64], "data_path": str(tmp_path / "images"), "val_split": 0.0}
    given |= {"output_dir": str(tmp_path / "run"), "device": "cuda", "use_bf16": True, "kernels": "torch"}
    given |= {"progressive": "256:4:4,512:1:8"}
    printed = run_on_null_gpu("-c", TWO_STAGES, json.dumps(given), gib=8).stdout
    assert ", CUDA graph" in printed
    assert "512 px, batch 8 as 1 x 8" in printed
    assert printed.count("\nmemory  predicted") == 2
    assert "out of memory" not in printed


def test_validations_and_samples_free_the_memory_of_the_graph(tmp_path: Path):
    """Beside the graph they need 0.43 GiB; its capture needs 0.06, a workspace of cuBLAS and gaps."""
    write_noise(tmp_path / "images", 20, 256, 256)
    given = {**TINY, "channels": [64, 64], "norm_groups": 8, "data_path": str(tmp_path / "images")}
    given |= {"image_size": 256, "batch_size": 8, "num_epochs": 6, "val_split": 0.4, "val_freq": 3}
    given |= {"quick_val_steps": 5, "save_samples_freq": 5, "device": "cuda", "use_bf16": True}
    given |= {"kernels": "torch", "perceptual_weight": 1.0, "perceptual_net": "random", "recompute": "all"}
    runs = [
        {**given, "cuda_graph": graph, "output_dir": str(tmp_path / str(graph))} for graph in (False, True)
    ]
    printed = run_on_null_gpu("-c", WITH_AND_WITHOUT_GRAPH, json.dumps(runs), gib=16).stdout
    assert "\n1 captures" in printed  # nothing of a validation outlives it: the graph stays
    memory = [records(tmp_path / folder, "memory")[-1] for folder in ("False", "True")]
    eager, graph = (found["memory_reserved_gib"] for found in memory)
    assert eager - 0.05 < graph < eager + 0.1
    assert all(found["memory_retries"] == 0 for found in memory)
