"""VAEs of images with alpha and of grey images: from an RGB VAE, trained, written and used."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from tests.harness.runs import TINY, run_here
from tests.harness.small_vae import SMALL, write_vae
from tests.harness.vae_families import image
from vae.config.trained_vae_flags import ExportConfig
from vae.images.channels import LUMA
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae, load_weights, read_vae
from vae.model.autoencoder import AutoencoderKL as Ours
from vae.model.initialization import initialize, natural_images
from vae.training.run import train

SHAPE = ("channels", "norm_groups", "layers_per_block", "z_channels")  # of the file


def changed(folder, channels: int) -> Ours:
    """The VAE in a folder with other image channels, before training."""
    file = read_vae(folder)
    file.change_image_channels(channels)
    model = Ours(replace(SMALL, image_channels=channels))
    load_weights(model, file.weights)
    return model.eval()


@torch.no_grad()
def test_the_function_on_opaque_images_stays(tmp_path):
    """In fp64, because another order of sums in fp32 is a larger change; borders included."""
    rgb = load_vae(write_vae(tmp_path / "rgb")).autoencoder.double()
    rgba = changed(tmp_path / "rgb", 4).double()
    images = image().double()
    opaque = torch.cat([images, torch.ones_like(images[:, :1])], 1)
    recon, mean, logvar = rgba(opaque)
    for found, expected in zip((recon[:, :3], mean, logvar), rgb(images), strict=True):
        assert (found - expected).abs().max() <= 1e-6
    assert (recon[:, 3] == 1).all()
    clear = rgba.encode(torch.cat([images, -torch.ones_like(images[:, :1])], 1)).mean
    assert (clear - mean).abs().mean() > 0.1 * mean.abs().mean()  # latents depend on alpha


@torch.no_grad()
def test_a_grey_vae_has_the_luma_of_an_rgb_vae(tmp_path):
    rgb = load_vae(write_vae(tmp_path / "rgb")).autoencoder.double()
    shades = image()[:, :1].double()
    recon, mean, _ = changed(tmp_path / "rgb", 1).double()(shades)
    expected, same_mean, _ = rgb(shades.expand(-1, 3, -1, -1))
    luma = torch.tensor(LUMA).double()  # as rounded to fp32
    assert (recon[:, 0] - torch.einsum("c,bchw->bhw", luma, expected)).abs().max() <= 1e-6
    assert (mean - same_mean).abs().max() <= 1e-5  # of weights in fp32, whose sums are rounded


@pytest.mark.parametrize("channels", [1, 4])
def test_warm_start_is_a_codec_of_all_channels(channels):
    model = Ours(replace(SMALL, image_channels=channels))
    initialize(model, "warm", 0)
    images = natural_images(26, 64, channels)[24:]  # the fits see others
    with torch.no_grad():
        error = (model(images)[0] - images).square().mean((0, 2, 3))
    assert error.shape == (channels,)
    assert (error < 0.5 * images.var((0, 2, 3))).all()


@pytest.fixture
def cut_outs(tmp_path):
    """Photographs-like images with hard and soft edges of alpha, as PNG and WebP files."""
    folder = tmp_path / "images"
    folder.mkdir()
    y, x = np.mgrid[0:48, 0:56]
    for number, picture in enumerate(natural_images(8, 56)):
        colors = ((picture[:, :48] * 0.25 + 0.5).clamp(0, 1) * 255).byte().movedim(0, -1).numpy()
        distance = np.hypot(x - 20 - number, y - 24) - 14
        alpha = np.clip(-distance * (40 if number % 2 else 255), 0, 255).astype(np.uint8)
        name = f"{number}.webp" if number % 3 == 0 else f"{number}.png"
        Image.fromarray(np.dstack([colors, alpha])).save(folder / name, lossless=True)
    return folder


def trained(folder, tmp_path, **given):
    write_vae(tmp_path / "rgb")
    options = {name: value for name, value in TINY.items() if name not in SHAPE}
    options |= {
        "init_from": str(tmp_path / "rgb"),
        "data_path": str(folder),
        "output_dir": str(tmp_path / "run"),
    }
    assert train({**options, **given}) == 0
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 4])
def test_a_trained_vae_is_written_and_used(channels, cut_outs, tmp_path):
    """Also with a discriminator, resized crops and augmentations: terms and crops of any channels."""
    how = {
        "image_channels": channels,
        "adversarial_weight": 0.1,
        "disc_start": 1,
        "disc_layers": 2,
        "disc_warmup": 0,
    }
    how |= {"ssim_weight": 0.3, "equivariance_weight": 0.1, "crop": "resized", "rotate90": True}
    how |= {"color_jitter": [0.1, 0.1, 0.1, 0.05], "save_samples_freq": 1, "num_epochs": 2, "batch_size": 2}
    run = trained(cut_outs, tmp_path, **how)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    last = [record for record in records if record["kind"] == "validation"][-1]
    assert ("psnr_alpha" in last) == (channels == 4)
    assert Image.open(next((run / "samples").glob("*.png"))).mode == "RGB"

    export(ExportConfig(vae=(str(run / "vae"),), output=str(tmp_path / "out")))
    theirs, loading = AutoencoderKL.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    assert (theirs.config.in_channels, theirs.config.out_channels) == (channels, channels)
    pixels = natural_images(1, 32, channels).clamp(-1, 1)
    expected = load_vae(run / "vae").autoencoder(pixels)[0]
    assert (theirs.eval()(pixels).sample - expected).abs().max() < 1e-5 * expected.abs().max()

    words = ("--mode", "reconstruct", "--vae", run / "vae", "--device", "cpu")
    words += ("--input", cut_outs, "--output_dir", tmp_path / "png")
    assert run_here("infer_vae.py", *words).returncode == 0
    written = Image.open(tmp_path / "png" / "3.png")
    assert written.mode == ("RGBA" if channels == 4 else "L")
    assert written.size == (56, 48)
    words = ("--vae", run / "vae", "--data_path", cut_outs, "--output_dir", tmp_path / "report")
    words += ("--device", "cpu", "--sizes", 32, "--perceptual_net", "none")
    assert run_here("evaluate_vae.py", *words).returncode == 0
    of_vae, *others = json.loads((tmp_path / "report" / "results.json").read_text("utf-8"))["vaes"]
    assert (of_vae["sizes"][0]["metrics"]["psnr_alpha"] is None) == (channels == 1)
    assert any(row["name"].startswith("JPEG") for row in others) == (channels == 1)


def test_vaes_of_other_channels_are_not_compared(image_folder, tmp_path):
    write_vae(tmp_path / "rgba", shape=replace(SMALL, image_channels=4))
    write_vae(tmp_path / "rgb2")
    both = (tmp_path / "rgb2", tmp_path / "rgba")
    done = run_here(
        "evaluate_vae.py", "--vae", *both, "--data_path", image_folder, "--output_dir", tmp_path / "report"
    )
    assert done.returncode != 0
    assert "has 4 image channels, and" in done.stderr
