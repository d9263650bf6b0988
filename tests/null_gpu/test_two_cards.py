"""Two processes of the real trainer, a card each: a step waits for the other one on the card only."""

import json
from pathlib import Path

import pytest

from tests.harness.runs import TINY
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU
OPTIONS = {name: TINY[name] for name in ("channels", "layers_per_block", "norm_groups", "z_channels")}
OPTIONS |= {"perceptual_weight": 0.0, "kernels": "torch"}  # nothing to compile


@pytest.mark.parametrize("graph", [False, True])
def test_launches_of_a_step(image_folder: Path, graph: bool):
    options = json.dumps({**OPTIONS, "cuda_graph": graph})
    words = ["--data_path", str(image_folder), "--px", "32", "--steps", "3", "--options", options]
    printed = run_on_null_gpu("benchmarks/two_cards.py", *words, sm=90).stdout
    cost = json.loads(printed.splitlines()[-1])
    assert (
        cost["graph_launches"] == 2 * graph
    )  # what comes before the sum of the bucket, and what comes after
    assert cost["synchronizations"] == 0
    assert cost["collectives"] == 2  # what the processes agree on, and a single bucket
    assert (cost["launches"] + cost["library_calls"] < 60) == graph
