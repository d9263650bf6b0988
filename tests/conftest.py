"""Fixtures of many tests: a folder of small images, and the options of a run that takes seconds."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import setuptools  # noqa: F401  # Inductor's; on Python 3.11 its import fails after a search for pip
import torch
import torchvision  # noqa: F401  # before the hook, which would compile it again
from jaxtyping import install_import_hook
from PIL import Image

from vae.config.options import LossConfig

# Tests check the annotations of vae.ops.shapes. Not in the layers: torch.compile would trace the checks,
# and not in modules with Triton kernels, which Triton could not compile. Dynamo of PyTorch 2.10 and 2.11
# traces those of the networks too, and fails; that of 2.12 was not tried.
CHECKED = ["model.autoencoder", "model.discriminator"]
terms = [item.name.removesuffix("_weight") for item in fields(LossConfig) if "term" in item.metadata]
CHECKED += [f"losses.{name}" for name in ("adversarial", *terms)]
if torch.__version__ >= (2, 13):
    install_import_hook([f"vae.{name}" for name in CHECKED], "beartype.beartype")

from tests.harness.runs import TINY  # noqa: E402
from tests.harness.signals import handle_ignored_signals  # noqa: E402
from vae.config.precision import PrecisionSupport  # noqa: E402
from vae.training import precision, results_image  # noqa: E402


def pytest_configure() -> None:
    handle_ignored_signals()
    # The first backward pass of a process starts a thread for each device; after a test with tensors of a
    # faked card it would find one, and forked processes could not train.
    torch.ones(1, requires_grad=True).backward()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _curves_are_not_drawn() -> Iterator[None]:
    """Drawing results.png takes 2 of the 3 seconds of a small run; test_results_image.py draws it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_image, "draw_results", lambda _records: b"not drawn")
        yield


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 16 smooth colour images of 48 x 40 px, half of them in a subfolder."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "inner").mkdir()
    random = np.random.default_rng(0)
    for index in range(16):
        coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((48, 40), Image.Resampling.BICUBIC)
        image.save(folder / ("inner" if index % 2 else ".") / f"image_{index:02d}.png")
    return folder


@pytest.fixture(scope="session")
def other_images(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images of `image_folder` mirrored: other files, as --val_path needs them."""
    folder = tmp_path_factory.mktemp("other")
    for path in image_folder.rglob("*.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / path.name)
    return folder


@pytest.fixture
def computes_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU claims to be a card: --mixed_precision then really computes in fp16, only slower."""
    card = PrecisionSupport("the CPU", is_gpu=True, bf16="native")
    monkeypatch.setattr(precision, "precision_support", lambda _device: card)


@pytest.fixture
def tiny(image_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a run that takes seconds, on `image_folder`, into a new folder."""
    return {**TINY, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
