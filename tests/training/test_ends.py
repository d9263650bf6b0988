"""The last norm and convolution of encoder and decoder learn slowly from a warm start."""

import pytest
import torch

from tests.harness.training_runs import train_short
from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig, OptimConfig
from vae.images.pixels import psnr
from vae.losses.terms import build_terms
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize, natural_images
from vae.optimizers import WARM_ENDS_SHARE, build_optimizers, set_learning_rate
from vae.step import Networks, StepInputs, compute_gradients
from vae.update import UpdateState, apply_update


@pytest.mark.parametrize(
    ("init", "share", "optimizer"), [("warm", WARM_ENDS_SHARE, "muon"), ("default", 1.0, "adamw")]
)
def test_share_of_the_rate_follows_the_start_of_the_run(tiny, tmp_path, init, share, optimizer):
    changes = {"init": init, "optimizer": optimizer, "learning_rate": 1e-3, "max_steps": 1}
    content = train_short(tiny, tmp_path / "run", **changes, lr_schedule="constant", warmup_epochs=0)
    others, ends, *hidden = (group["lr"] for group in content["optimizers"][0]["param_groups"])
    assert (others, *hidden) == (1e-3,) * (2 if optimizer == "muon" else 1)
    assert ends == pytest.approx(share * 1e-3)


def test_first_step_from_a_warm_start_keeps_the_images():
    """At the full rate, equal changes of the ends add up to a constant color."""
    images = natural_images(4, 64)
    pixels = images.add(1).mul(127.5).clamp(0, 255).byte()
    noise = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    loss = LossConfig(perceptual_weight=0.0)
    terms = build_terms(loss, torch.float32, "cpu")

    def lost_by_a_step(share: float) -> float:
        """dB of PSNR."""
        config = ModelConfig(channels=(16, 32, 32, 32), layers_per_block=1, norm_groups=4)
        model = AutoencoderKL(config)
        initialize(model, "warm", 0)
        optimizer = build_optimizers(model, None, OptimConfig(), loss).autoencoder
        networks = Networks(model, None, terms, torch.float32, channels_last=False)
        update, found = UpdateState.begin(torch.device("cpu"), fp16=False), []
        for _ in range(2):
            with torch.no_grad():
                found.append(psnr(model(images)[0], images).mean().item())
            compute_gradients(networks, StepInputs(pixels, noise, 0.25, update.loss_scale, None), [4])
            set_learning_rate(optimizer, 1e-3, share)
            apply_update([optimizer], update, OptimConfig(), fp16=False, empty=False)
        return found[0] - found[1]

    assert lost_by_a_step(WARM_ENDS_SHARE) < 0.5 < 1.5 < lost_by_a_step(1.0)  # 0.34 and 2.15
