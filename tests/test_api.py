"""The Python API: conversion of every kind of image, encoding, decoding, and options checked as flags."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vae
from tests.harness.small_vae import write_vae
from vae.interop.latent_statistics import LatentConstants
from vae.system.files import claim_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vae.load_vae(write_vae(tmp_path_factory.mktemp("vae")), device="cpu")


@pytest.fixture
def pixels():
    return np.random.default_rng(1).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def test_every_kind_of_image_gives_the_same_tensor(tmp_path, pixels):
    Image.fromarray(pixels).save(tmp_path / "image.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    expected = (tensor.float() / 127.5 - 1)[None]
    kinds = [
        str(tmp_path / "image.png"),
        tmp_path / "image.png",
        Image.fromarray(pixels),
        pixels,
        pixels[None],
        tensor,
        tensor[None],
        expected,
        expected[0],
    ]
    for kind in kinds:
        assert torch.equal(vae.load_images(kind), expected)
    batch = vae.load_images(kinds)
    assert batch.shape == (9, 3, 24, 32)
    assert batch.dtype == torch.float32


def test_pil_image_is_rotated_and_composited(pixels):
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = 6  # EXIF orientation: rotate by 90 degrees clockwise to view
    rotated = np.ascontiguousarray(np.rot90(pixels, -1))
    assert torch.equal(vae.load_images(image), vae.load_images(rotated))
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 255, 255, 255))
    expected = torch.full((1, 3, 8, 8), -1.0)
    expected[..., 0, 0] = 1.0
    assert torch.equal(vae.load_images(clear, background="black"), expected)


def test_to_pil_inverts_load_images(pixels):
    (image,) = vae.to_pil(vae.load_images(pixels))
    assert np.array_equal(np.asarray(image), pixels)


def test_images_without_a_valid_form_are_errors(tmp_path, pixels):
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    with pytest.raises(vae.UserError, match=r"torn\.png"):
        vae.load_images(tmp_path / "torn.png")
    with pytest.raises(vae.UserError, match="32x24"):
        vae.load_images([pixels, pixels[:16]])
    for wrong in (pixels[..., 0], pixels[..., :2], pixels.astype(np.int64), torch.zeros(1, 4, 8, 8)):
        with pytest.raises(vae.UserError, match="give"):
            vae.load_images(wrong)
    with pytest.raises(vae.UserError, match="at least one"):
        vae.load_images([])


def test_encode_and_decode(model, pixels):
    images = vae.load_images(pixels[:21, :30])  # sides that need padding
    latents = vae.encode(model, images)
    factor = model.autoencoder.downsampling
    assert latents.shape == (1, model.autoencoder.config.z_channels, -(-21 // factor), -(-30 // factor))
    decoded = vae.decode(model, latents, size=(21, 30))
    assert decoded.shape == images.shape
    assert not decoded.requires_grad
    assert torch.equal(vae.reconstruct(model, pixels[:21, :30]), decoded)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: vae.encode(m, np.full((16, 16, 3), 200.0)), r"values up to 200: give floats in \[-1, 1\]"),
        (lambda m: vae.encode(m, torch.full((3, 16, 16), torch.nan)), "values up to nan"),
        (lambda m: vae.encode(m, torch.zeros(3, 4, 16)), "a side of 4 px is smaller than 8 px"),
        (lambda m: vae.decode(m, torch.zeros(1, 3, 16, 16)), r"shape \(1, 3, 16, 16\): give \(B, 16,"),
        (  # width and height exchanged: a part of the image would be returned
            lambda m: vae.decode(m, torch.zeros(1, 16, 6, 8), size=(30, 21)),
            r"size=\(30, 21\) does not match the latents: give \(H, W\), H 21 to 24, W 29 to 32",
        ),
        (lambda _: vae.load_vae("vae", device="gpu"), 'device="gpu" is unknown: use one of auto, cuda, cpu'),
        (lambda m: vae.encode(m, np.zeros((16, 16, 3), np.uint8), dtype="half"), "fp32, fp16, bf16"),
    ],
)
def test_wrong_arguments_are_one_line(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_latents_that_are_scaled_and_pixels_from_0_to_1_are_said(model, pixels):
    floats = torch.rand(1, 3, 32, 32)
    with pytest.warns(UserWarning, match=r"images \* 2 - 1"):
        vae.load_images(floats)
    loaded = replace(model, file=replace(model.file, constants=LatentConstants(0.13025)))
    latents = torch.randn(1, loaded.autoencoder.config.z_channels, 4, 4)
    with pytest.warns(UserWarning, match=r"latents / vae.scaling_factor"):
        vae.decode(loaded, latents)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vae.load_images(floats * 2 - 1)
        vae.load_images(pixels)
        vae.decode(loaded, latents / 0.13025)


def test_seed_selects_a_reproducible_sample(model, pixels):
    mode, first, again, other = (vae.encode(model, pixels, seed=seed) for seed in (None, 1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, mode)


@pytest.mark.parametrize(
    ("call", "token"),
    [
        (lambda: vae.load_vae("nothing"), "nothing"),
        (lambda: vae.load_vae("/nothing", weights="best"), 'weights="best"'),
        (lambda: vae.train(data_path="/nothing", batchsize=4), "did you mean --batch_size"),
        (lambda: vae.train(data_path="/nothing", batch_size=0), "--batch_size 0"),
        (lambda: vae.train(data_path="/nothing", channels=[8, "x"]), "--channels: invalid int value: 'x'"),
        (lambda: vae.evaluate("/nothing", "/nothing", "/nothing", sizes=[4]), "--sizes 4"),
        (lambda: vae.export("nothing", "out"), "--vae nothing"),
    ],
)
def test_invalid_option_is_a_user_error(call, token):
    with pytest.raises(vae.UserError, match=token.replace("[", r"\[")):
        call()


def test_evaluate_keeps_earlier_results(tmp_path):
    claim_folder(tmp_path, "evaluate")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(vae.UserError, match=r"--output_dir .* --overwrite"):
        vae.evaluate("/nothing", "/nothing", tmp_path)
    assert (tmp_path / "results.json").read_text() == "{}"


@pytest.mark.slow
def test_train_returns_files_and_records(tiny, tmp_path):
    """Gradio, FastAPI and notebooks call functions in threads, which get no signals."""
    options = {**tiny, "num_workers": 1, "max_steps": 2, "log_freq": 1}
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(vae.train, **options).result()
    assert result.is_complete
    assert result.output_dir == tmp_path / "run"
    assert result.validation["psnr"] > 0
    assert [r["step"] for r in result.records if r["kind"] == "train"] == [1, 2]
    assert vae.load_vae(result.vae).scaling_factor is not None
    checkpoint = next(result.output_dir.glob("checkpoint_*.pt"))
    resumed = vae.train(resume_from=checkpoint, device="cpu", num_workers=0, max_steps=3)
    assert resumed.output_dir == result.output_dir
    assert len(resumed.records) > len(result.records)


def test_blended_tiles(model):
    images = torch.rand(1, 3, 160, 200) * 2 - 1
    tiles = vae.reconstruct(model, images, tile=128)
    assert tiles.shape == images.shape
    assert not torch.equal(tiles, vae.reconstruct(model, images))
