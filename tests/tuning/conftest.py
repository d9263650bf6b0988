"""A base configuration, and searches with the stand-in for the trainer; they need Optuna."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.stub_trainer import write_stub

pytest.importorskip("optuna", reason="the search needs optuna: pip install -r requirements-tune.txt")

import tune_vae
from vae.tuning import training_process


@pytest.fixture
def base(image_folder, tmp_path) -> Path:
    """A JSON file of options: the defaults of a search."""
    path = tmp_path / "base.json"
    options = {"data_path": str(image_folder), "perceptual_weight": 0.0, "image_size": 32, "z_channels": 4}
    path.write_text(json.dumps({**options, "learning_rate": 1e-4}))
    return path


@pytest.fixture
def stub(tmp_path) -> Path:
    return write_stub(tmp_path / "stub")


@pytest.fixture
def tune(base, stub, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Run tune_vae.py here, with a space and more flags; returns its folder."""
    monkeypatch.setattr(training_process, "ROOT", stub)
    monkeypatch.setattr(training_process, "POLL_SECONDS", 0.02)

    def run(space: dict, *flags: str, output: str = "search") -> Path:
        (tmp_path / "space.json").write_text(json.dumps(space))
        words = ["--config", str(base), "--space", str(tmp_path / "space.json"), *flags]
        assert tune_vae.main([*words, "--output_dir", str(tmp_path / output)]) == 0
        return tmp_path / output

    return run
