#!/usr/bin/env python3
"""PSNR of disturbed runs beside that of an undisturbed one, and runs whose learning rate is too high."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.harness.faults import Fault, run_forked  # noqa: E402
from tests.harness.training_runs import records  # noqa: E402
from vae.config.errors import EXIT_NON_FINITE  # noqa: E402
from vae.training.checkpoints.store import load_newest  # noqa: E402

MODEL = {"channels": [16, 32, 32, 32], "layers_per_block": 1, "norm_groups": 8, "perceptual_weight": 0.0}
RECIPE = {"image_size": 64, "batch_size": 4, "learning_rate": 1e-3, "warmup_epochs": 10, "val_split": 0.3}
RECIPE |= {"val_freq": 50, "checkpoint_freq": 5, "num_workers": "0", "save_samples_freq": 0, "device": "cpu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_path", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--at", type=float, nargs="*", default=[0.3, 0.6, 0.9], help="shares of the steps")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e3, 1e30], help="learning rates")
    given = parser.parse_args()
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        **MODEL,
        **RECIPE,
        "data_path": str(given.data_path),
        "num_epochs": given.epochs,
    }
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log.txt"

        def run(title: str, *faults: Fault, **changes: Any) -> tuple[int, Path]:
            began, out = time.monotonic(), folder / title.replace(" ", "_")
            (code,) = run_forked({**options, **changes, "output_dir": str(out)}, *faults, log=log)
            found = [f"{title}: exit {code}, {time.monotonic() - began:.0f} s"]
            for one in records(out, "rollback"):
                found.append(f"step {one['diverged_at']} -> {one['step']} ({one['reason']})")
            print("; ".join(found), flush=True)
            return code, out

        _, plain = run("undisturbed")
        steps = records(plain, "train")[-1]["step"]
        expected = records(plain, "validation")[-1]["psnr"]
        print(f"{steps} steps: {expected:.2f} dB", flush=True)
        streak = 60
        for share in given.at:
            step = round(share * steps)
            faults = {
                f"weights doubled at step {step}": Fault("scale_weights", "step", nth=step, value=2.0),
                f"gradients NaN from step {step}": Fault("nan", "step", nth=step, times=streak),
            }
            for title, fault in faults.items():
                code, out = run(title, fault)
                psnr = records(out, "validation")[-1]["psnr"]
                print(f"{title}: exit {code}, {psnr:.2f} dB, {psnr - expected:+.2f} dB", flush=True)
        for rate in given.rates:
            code, out = run(f"learning rate {rate:g}", learning_rate=rate)
            newest = load_newest(out)  # which checks that it is finite
            assert newest is not None
            print(json.dumps({"exit": code, "expected": EXIT_NON_FINITE, "good": newest[0].name}), flush=True)


if __name__ == "__main__":
    main()
