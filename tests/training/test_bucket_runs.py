"""Runs with --buckets: resuming, processes, shards, the memory plan, and mistakes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.training_runs import ONE_PROCESS, assert_same_result, records
from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE, Config, LossConfig, SpeedConfig
from vae.memory import plan
from vae.memory.plan import stage_spec, step_memory
from vae.sampling.buckets import bucket_shapes
from vae.system.errors import UserError
from vae.training.run import train
from vae.training.stage_memory import uses_cuda_graph

SIZES = [(64, 40)] * 6 + [(40, 64)] * 5 + [(48, 48)] * 7  # width, height


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """18 smooth images of three aspects."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for index, size in enumerate(SIZES):
        coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index:02}.png")
    return folder


@pytest.fixture
def given(tiny, pictures) -> dict:
    """9 steps in an epoch: 3, 2 and 3 pairs of the three shapes, and one of what is left."""
    short = {"buckets": 3, "batch_size": 2, "num_epochs": 1, "init": "default", "log_freq": 1}
    return {**tiny, **short, "data_path": str(pictures), "val_split": 0.0}


@pytest.mark.slow
def test_run_is_resumed_within_an_epoch(given, tmp_path, capsys):
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    assert train({**given, "output_dir": whole}) == 0
    printed = capsys.readouterr().out
    assert "crops of 3 shapes (24x40, 32x32, 40x24)" in printed
    assert len(records(tmp_path / "whole", "train")) == 18 // 2
    assert train({**given, "output_dir": parts, "max_steps": 3}) == 0
    again = {**given, "output_dir": parts, "resume_from": "latest", "num_workers": "1"}
    assert train(again) == 0
    assert_same_result(tmp_path / "parts", tmp_path / "whole")
    assert "resume  exact" in capsys.readouterr().out
    other = {**again, "buckets": 5, "num_epochs": 2, "new_stage": True}
    assert train(other) == 0
    assert "another dataset or transform (transform)" in capsys.readouterr().out


@pytest.mark.parametrize("level", [RECOMPUTE[0], RECOMPUTE[-1]])
def test_plan_of_the_square_is_enough_for_every_shape(monkeypatch, level):
    model = ModelConfig(channels=(32, 64, 64), layers_per_block=1)
    config = replace(Config(), model=model, loss=LossConfig(perceptual_weight=0.0, adversarial_weight=0.5))
    spec = replace(stage_spec(config, 128, 2, torch.float32, 0), recompute=level)
    plan.count_step.cache_clear()
    square, zero_inputs = step_memory(spec, 2), plan.zero_inputs
    for height, width in bucket_shapes(128, 4, 5):

        def shaped(spec, images, device, height=height, width=width):
            noise = torch.empty(images, spec.model.z_channels, height // 4, width // 4, device=device)
            pixels = torch.empty(images, 3, height, width, dtype=torch.uint8, device=device)
            return replace(zero_inputs(spec, images, device), images=pixels, noise=noise)

        monkeypatch.setattr(plan, "zero_inputs", shaped)
        plan.count_step.cache_clear()
        assert step_memory(spec, 2).total <= square.total
    plan.count_step.cache_clear()


def test_mistakes_are_one_line(given):
    for change, words in (
        ({"image_size": 16, "buckets": 5}, r"--buckets 5 .*--image_size 16.*--buckets 1"),
        ({"batch_size": 64}, "--batch_size 64"),
        ({"rotate90": True}, "--rotate90 .*--buckets 3"),
        ({"crop": "resized"}, "--crop resized .*--buckets 3"),
    ):
        with pytest.raises(UserError, match=words):
            train({**given, **change})
    with pytest.raises(UserError, match=r"--cuda_graph .*--buckets 3"):
        uses_cuda_graph(SpeedConfig(cuda_graph=True), 512, ONE_PROCESS, buckets=3)
