#!/usr/bin/env python3
"""Time that a save takes from training, with and without --background_save, in one process."""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.config.options import Config, flatten  # noqa: E402
from vae.memory.plan import checkpoint_bytes  # noqa: E402
from vae.training.checkpoints.writer import CheckpointWriter  # noqa: E402
from vae.training.stages import Stage  # noqa: E402
from vae.training.state import TrainingState, begin_state, checkpoint_content  # noqa: E402


def seconds(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def trained_state(device: torch.device) -> TrainingState:
    """The default model and its optimizer after one step with random gradients."""
    state = begin_state(Config(), device, fp16=False)
    state.stages = [Stage(0, 1, 512, 1)]
    for parameter in state.autoencoder.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizers[0].step()
    state.optimizers[0].zero_grad(set_to_none=True)
    state.position.step = 1
    return state


def step(state: TrainingState) -> None:
    """A forward and backward pass of one 64 px image, and an update."""
    images = torch.zeros(1, 3, 64, 64, device=state.running_sq_norms.device)
    noise = torch.zeros(1, 16, 8, 8, device=images.device)
    recon, _mean, _logvar = state.autoencoder(images, noise)
    recon.square().mean().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_dir", default=None, help="folder on the disk to measure")
    given = parser.parse_args()
    state = trained_state(torch.device(given.device))
    writers = {name: CheckpointWriter(background=name == "background") for name in ("blocking", "background")}
    stalls: dict[str, list[float]] = {name: [] for name in writers}
    steps: dict[str, list[float]] = {"alone": [], "while saving": []}
    with tempfile.TemporaryDirectory(dir=given.output_dir) as folder:
        for round_number in range(given.rounds + 1):  # the first one allocates and is not counted
            for name, writer in writers.items():
                content = checkpoint_content(state, flatten(Config()), "0" * 64)
                path = Path(folder) / f"{name}.pt"
                stall = seconds(lambda: writer.save(path, content, list))  # noqa: B023
                while_saving = seconds(lambda: step(state))
                assert writer.finish() is None
                alone = seconds(lambda: step(state))
                if round_number:
                    stalls[name].append(stall)
                    steps["while saving" if name == "background" else "alone"].append(while_saving)
                    steps["alone"].append(alone)
        size = path.stat().st_size
    tensors = checkpoint_bytes(Config()) / 1e9
    print(
        f"{given.device}, {torch.get_num_threads()} threads, {tensors:.2f} GB, file of {size / 1e9:.2f} GB;"
    )
    print(f"median of {given.rounds}, smallest and largest:")
    for title, found in (("training waits", stalls), ("a step takes", steps)):
        for name, values in found.items():
            median = statistics.median(values)
            print(f"{title:16}{name:14}{median:8.3f} s  ({min(values):.3f} to {max(values):.3f})")
    ratio = statistics.median(stalls["blocking"]) / statistics.median(stalls["background"])
    print(f"blocking / background: {ratio:.1f}")


if __name__ == "__main__":
    main()
