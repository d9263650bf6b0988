"""Runs with every regulariser are exact under resuming, micro-batches and processes."""

import pytest
import torch

from tests.harness.training_runs import (
    assert_same_result,
    assert_weights_close,
    last_checkpoint,
    records,
    train_on_two_processes,
    train_short,
)
from vae.system.errors import UserError
from vae.training.run import train

REGULARISERS = {
    "variance_weight": 0.01,
    "local_correlation_weight": 0.01,
    "equivariance_weight": 0.25,
    "equivariance_turns": True,
    "decoder_noise": 0.3,
    "adversarial_weight": 0.5,
    "disc_start": 1,
    "disc_ramp": 2,
    "disc_channels": 8,
    "disc_layers": 1,
    "disc_augment": True,
    "lecam_weight": 0.1,
    "checkpoint_steps": 1,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "whole", **REGULARISERS)
    assert expected["running_moments"][0].tolist() == pytest.approx([1 - 0.99**4] * 4)
    train_short(tiny, tmp_path / "parts", **REGULARISERS, max_steps=2)
    train_short(tiny, tmp_path / "parts", **REGULARISERS, resume_from="latest")
    assert_same_result(tmp_path / "parts", tmp_path / "whole")
    values = records(tmp_path / "whole", "train")[-1]
    assert all(values[name] > 0 for name in ("variance", "local_correlation", "equivariance", "lecam"))


@pytest.mark.slow
def test_two_processes_and_micro_batches_train_like_one_process(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "one", **REGULARISERS)
    two = {**tiny, "init": "default", "val_split": 0.0, "num_epochs": 1, "log_freq": 1, **REGULARISERS}
    two |= {"batch_size": 2, "micro_batch_size": "1", "output_dir": str(tmp_path / "two")}
    train_on_two_processes(two)
    found = last_checkpoint(tmp_path / "two")
    assert_weights_close(found, expected)
    for name in ("running_moments", "running_logits"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
        assert found[name].abs().min() > 0


@pytest.mark.slow
def test_a_new_stage_finishes_without_the_noise(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", decoder_noise=0.5)
    done = train_short(tiny, tmp_path / "run", decoder_noise=0.0, resume_from="latest", new_stage=True)
    assert (done["config"]["decoder_noise"], done["position"]["step"]) == (0.0, 8)


def test_a_crop_that_is_too_small_is_one_line(tiny):
    with pytest.raises(UserError, match="--equivariance_weight decodes half the crop and needs at least 32"):
        train({**tiny, "equivariance_weight": 0.5, "image_size": 24})
    with pytest.raises(UserError, match="--local_correlation_weight needs crops of at least 4 px"):
        train({**tiny, "local_correlation_weight": 0.5, "z_channels": 2})
