"""Fixtures that many tests share: a folder of small images and the options of a run that takes seconds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.runs import TINY


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
