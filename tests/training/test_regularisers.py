"""Runs with every regulariser are exact with micro-batches and processes; test_resume.py resumes them."""

import pytest
import torch

from tests.harness.training_runs import (
    assert_weights_close,
    last_checkpoint,
    train_on_two_processes,
    train_short,
)
from vae.config.model_options import ModelConfig
from vae.config.options import MIN_VIEW, LossConfig
from vae.config.resolve import LEAST_SIDES, check_views
from vae.losses.perceptual import TRUNKS
from vae.system.errors import UserError
from vae.training.run import train

REGULARISERS = {
    "variance_weight": 0.01,
    "equivariance_weight": 0.25,
    "adversarial_weight": 0.5,
    "disc_start": 1,
    "disc_ramp": 2,
    "disc_channels": 8,
    "disc_layers": 1,
    "checkpoint_steps": 1,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.slow
def test_two_processes_and_micro_batches_train_like_one_process(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "one", **REGULARISERS)
    two = {**tiny, "init": "default", "val_split": 0.0, "num_epochs": 1, "log_freq": 1, **REGULARISERS}
    two |= {"batch_size": 2, "micro_batch_size": "1", "output_dir": str(tmp_path / "two")}
    train_on_two_processes(two)
    found = last_checkpoint(tmp_path / "two")
    assert_weights_close(found, expected)
    name = "running_moments"
    torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert found[name].abs().min() > 0


def test_a_crop_that_is_too_small_is_one_line(tiny):
    remedies = "needs 32 px, not 24: raise --image_size or remove --equivariance_weight"
    with pytest.raises(UserError, match=remedies):
        train({**tiny, "equivariance_weight": 0.5, "image_size": 24})
    with pytest.raises(UserError, match=r"images of 24 px, and --perceptual_net alex needs 31: .* 124"):
        check_views(96, ModelConfig(), LossConfig(equivariance_weight=1.0, perceptual_net="alex"))
    for least, net in ((124, "alex"), (68, "squeeze"), (32, "vgg")):
        check_views(least, ModelConfig(), LossConfig(equivariance_weight=1.0, perceptual_net=net))
        assert TRUNKS[net].smallest_side == LEAST_SIDES.get(net, MIN_VIEW)
    with pytest.raises(UserError, match="needs at least 2 x 2 positions, not 1 of a crop of 32 px"):
        check_views(32, ModelConfig(channels=(32,) * 6), LossConfig(equivariance_weight=1.0))
