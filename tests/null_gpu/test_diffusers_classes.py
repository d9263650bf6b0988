"""Steps of networks that diffusers computes: no synchronization, and the predicted memory."""

import json

import pytest

from tests.harness.diffusers_models import CONFIGS, PUBLISHED
from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu
from vae.model.diffusers_autoencoder import model_values

pytestmark = NEEDS_NULL_GPU
# Two images, because some views of several are copies
OPTIONS = {"image_size": 512, "batch_size": 2, "kernels": "torch", "train_part": "all"}


def test_published_sizes_reserve_what_the_plan_predicts():
    cases = [
        {
            "options": OPTIONS,
            "vae": model_values({"_class_name": name, **PUBLISHED[name]})[0],
            "recompute": level,
            "micro_batch": "2",
            "workspace_mib": 164,
            "steps": 2,
            "gib": 80,
        }
        for name in CONFIGS
        for level in ("none", "all")
    ]
    done = run_on_null_gpu("-m", "tests.null_gpu.steps", json.dumps(cases), gib=80)
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        assert found["counts"]["synchronizations"] == 0
        assert found["reserved_gib"] == pytest.approx(found["predicted_gib"], rel=0.05), case
