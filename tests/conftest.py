"""What many tests share: a folder of small images and the options of a run that takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent

# A model of two levels and a recipe that trains in about a second on one core; no network is downloaded.
TINY = {
    "channels": [8, 16],
    "layers_per_block": 1,
    "norm_groups": 4,
    "z_channels": 4,
    "image_size": 32,
    "batch_size": 4,
    "num_epochs": 2,
    "perceptual_weight": 0.0,
    "num_workers": "0",
    "val_split": 0.25,
    "save_samples_freq": 0,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """16 smooth coloured images of 48 x 40 px in a folder of two levels."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "inner").mkdir()
    random = np.random.default_rng(0)
    for index in range(16):
        coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((48, 40), Image.Resampling.BICUBIC)
        image.save(folder / ("inner" if index % 2 else ".") / f"image_{index:02d}.png")
    return folder


@pytest.fixture
def tiny(image_folder, tmp_path) -> dict:
    """Given options of a run of seconds, on `image_folder`, into a new folder."""
    return {**TINY, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}


def as_flags(given: dict) -> list[str]:
    """The command line that gives these options."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def run_script(*words: str, env: dict | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """One of the scripts in a process of its own, with its output as text."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        timeout=300,
    )
