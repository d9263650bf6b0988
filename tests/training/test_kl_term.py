"""The KL term: a weight means the same at every size; its effect is measured."""

import numpy as np
import pytest
import torch

from tests.harness.runs import TINY
from tests.harness.toy_networks import gradients, toy_inputs, toy_networks
from tests.harness.training_runs import records
from tests.training.test_fine_tuning import crops
from vae.config.options import LossConfig
from vae.images.pixels import psnr
from vae.interop.vae_files import load_vae
from vae.losses.kl import kl_per_pixel
from vae.ops.noise import keyed_normal
from vae.step import compute_gradients
from vae.training.run import train


@pytest.fixture
def options(image_folder, tmp_path) -> dict:
    paths = {"data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    return {**TINY, **paths, "num_epochs": 1, "log_freq": 1}


def norms(size: int, loss: LossConfig) -> float:
    """The norm of the gradient of the encoder, for an image that repeats every 32 px."""
    networks, inputs = toy_networks(loss=loss, discriminator=False), toy_inputs(1, 32, factor=None)
    tiles = size // 32
    inputs.images = inputs.images.tile(1, 1, tiles, tiles)
    inputs.noise = inputs.noise.tile(1, 1, tiles, tiles)
    compute_gradients(networks, inputs, [1])
    parts = [g for name, g in gradients(networks.autoencoder).items() if name.startswith("encoder")]
    return torch.cat([part.flatten() for part in parts]).norm().item()


@pytest.mark.slow
def test_the_gradients_of_both_terms_keep_their_ratio_with_the_size_of_the_crop():
    kl = LossConfig(reconstruction_weight=0.0, perceptual_weight=0.0, kl_weight=1.0)
    pixels = LossConfig(perceptual_weight=0.0, kl_weight=0.0, reconstruction_loss="mse")
    ratios = [norms(size, kl) / norms(size, pixels) for size in (32, 128)]
    # a KL summed over the image would give a factor of 16; borders, which differ, take a part of small crops
    assert ratios[1] / ratios[0] == pytest.approx(1, abs=0.35)


def test_validations_record_the_noise_and_the_spread_of_the_latents(
    options, tmp_path, image_folder, other_images
):
    assert train({**options, "data_path": str(other_images), "val_path": str(image_folder)}) == 0
    record = records(tmp_path / "run", "validation")[-1]
    vae = load_vae(tmp_path / "run" / "checkpoint_epoch_1.pt")
    with torch.no_grad():
        found = [vae.autoencoder.encode(crop / 127.5 - 1) for crop in crops(image_folder)]
    mean = torch.cat([one.mean for one in found]).double().numpy()
    log_sigma = 0.5 * torch.cat([one.logvar for one in found]).double().numpy()
    std = mean.std((0, 2, 3))
    ratios = np.sort(np.exp(log_sigma.mean((0, 2, 3))) / std)
    assert record["sigma_over_std"] == pytest.approx(ratios[1], rel=1e-4)  # of 4 channels the lower median
    assert record["latent_std"] == pytest.approx(np.sqrt((std**2).mean()), rel=1e-4)


def test_validations_record_how_decoding_bears_noise(options, tmp_path, image_folder, other_images):
    assert train({**options, "data_path": str(other_images), "val_path": str(image_folder)}) == 0
    record = records(tmp_path / "run", "validation")[-1]
    model = load_vae(tmp_path / "run" / "checkpoint_epoch_1.pt").autoencoder
    images = torch.cat([crop / 127.5 - 1 for crop in crops(image_folder)])
    with torch.no_grad():
        latents = model.encode(images).mean
        std = latents.std((0, 2, 3), correction=0)[:, None, None]
        count = len(images)
        chosen = [n * count // min(4, count) for n in range(min(4, count))]
        noise = torch.stack([keyed_normal(latents.shape[1:], 0, index) for index in chosen]) * std
        for tau in (0.1, 0.2, 0.4):
            expected = psnr(model.decode(latents[chosen] + tau * noise), images[chosen]).mean()
            assert record[f"psnr_noise_{tau:g}"] == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.slow
def test_noise_that_hides_the_latents_is_reported_once(options, capsys):
    given = {**options, "num_epochs": 30, "val_freq": 10, "checkpoint_freq": 30, "learning_rate": 1e-2}
    assert train({**given, "kl_weight": 10.0}) == 0
    assert "".join(capsys.readouterr()).count("lower --kl_weight (now 10)") == 1


def test_kl_of_a_constant_posterior_is_that_of_its_density_of_latents():
    # sigma 1 and mean 1: half a nat per latent value; 16 values in 8 x 8 pixels
    for size in (64, 2048):
        mean = torch.ones(1, 16, size // 8, size // 8)
        assert kl_per_pixel(mean, torch.zeros_like(mean), size**2).item() == pytest.approx(0.5 * 16 / 64)
