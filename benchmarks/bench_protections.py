#!/usr/bin/env python3
"""Share of an undisturbed run that its protections take, timed within the run itself."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.training import between_steps, loop, saving  # noqa: E402
from vae.training import run as run_module  # noqa: E402
from vae.training.checkpoints.writer import CheckpointWriter  # noqa: E402
from vae.training.watchdog import Watchdog  # noqa: E402

# What training would not need if nothing ever went wrong, by the module that calls it.
PER_STEP = {
    "stop signals and rejected images": (loop, "_sync_ranks"),
    "failures of the last save": (CheckpointWriter, "report"),
    "sign of progress": (Watchdog, "beat"),
    "is training stable": (between_steps, "_check_stability"),
}
PER_SAVE = {"are the weights finite": (saving, "is_finite"), "whole save": (between_steps, "save")}
MODEL = {"channels": [32, 64, 64, 64], "layers_per_block": 1, "norm_groups": 8, "perceptual_weight": 0.0}
RECIPE = {"image_size": 128, "batch_size": 4, "num_workers": "0", "save_samples_freq": 0, "device": "cpu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_path", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint_steps", type=int, default=11)
    given = parser.parse_args()
    seconds, calls = Counter[str](), Counter[str]()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[name] += time.perf_counter() - began
                calls[name] += 1

        return call

    stages = {"the loop": (run_module, "train_stage")}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name, (owner, attribute) in {**PER_STEP, **PER_SAVE, **stages}.items():
            patched = patch.object(owner, attribute, timed(name, getattr(owner, attribute)))
            stack.enter_context(patched)
        options = {**MODEL, **RECIPE, "data_path": str(given.data_path), "output_dir": folder}
        options |= {"num_epochs": 1000, "max_steps": given.steps, "checkpoint_steps": given.checkpoint_steps}
        options |= {"checkpoint_freq": 1000, "val_freq": 1000}
        assert run_module.train(options) == 0
    total = seconds["the loop"]
    step = (total - seconds["whole save"]) / given.steps
    print(f"{torch.get_num_threads()} threads, {given.steps} steps of {1000 * step:.1f} ms")
    for name in (*PER_STEP, *PER_SAVE):
        each = 1e6 * seconds[name] / max(1, calls[name])
        print(f"{name:36}{calls[name]:6} calls of {each:10.1f} us  {100 * seconds[name] / total:8.4f} %")
    per_step = sum(seconds[name] for name in PER_STEP) / given.steps
    print(f"per step {1e6 * per_step:.1f} us: {100 * per_step / step:.4f} % of a step")


if __name__ == "__main__":
    main()
