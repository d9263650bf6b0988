"""Two processes of the real trainer, a card each: launches, synchronizations and memory of a step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import TINY
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU
OPTIONS = {name: TINY[name] for name in ("channels", "layers_per_block", "norm_groups", "z_channels")}
OPTIONS |= {"perceptual_weight": 0.0, "kernels": "torch"}  # nothing to compile


def cost_of(image_folder: Path, px: int, options: dict[str, Any]) -> dict[str, float]:
    """What benchmarks/two_cards.py prints, with the largest workspaces of cuDNN that the plan expects."""
    words = ["--data_path", str(image_folder), "--px", str(px), "--steps", "3", "--options"]
    settings: dict[str, Any] = {"sm": 90, "workspaces_mib": "164,0"}
    printed = run_on_null_gpu("benchmarks/two_cards.py", *words, json.dumps(options), **settings).stdout
    return json.loads(printed.splitlines()[-1])


def test_a_step_waits_for_the_other_process_on_the_card_only(image_folder: Path):
    cost = cost_of(image_folder, 32, OPTIONS)
    assert cost["graph_launches"] == 0
    assert cost["synchronizations"] == 0
    assert cost["collectives"] == 1  # of a single bucket


@pytest.mark.parametrize(
    "options",
    [
        {
            "adversarial_weight": 0.5,
            "disc_start": 0,
            "disc_warmup": 0,
            "batch_size": 3,
            "micro_batch_size": "1",
        },
        {"batch_size": 2},
    ],
)
def test_two_processes_reserve_what_the_plan_predicts(image_folder: Path, options: dict[str, Any]):
    cost = cost_of(image_folder, 256, {**options, "upscale": True})
    assert cost["reserved_gib"] == pytest.approx(cost["predicted_gib"], rel=0.03)
