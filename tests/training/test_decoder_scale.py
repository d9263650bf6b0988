"""--decoder_scale 2: a decoded image has twice the side of the encoder's input, with unchanged latents."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import AsymmetricAutoencoderKL, AutoencoderKL, AutoencoderKLFlux2
from PIL import Image
from safetensors.torch import load_file

import vae
from tests.harness.runs import TINY, run_here, run_script
from tests.harness.small_vae import SMALL, write_vae
from tests.harness.training_runs import last_checkpoint, records
from tests.harness.vae_families import diffusers_model, image
from tests.harness.wan_models import wan_model
from vae.config.model_options import ModelConfig
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae, load_weights, read_vae
from vae.interop.writing import diffusers_config, save_diffusers_folder, stored_weights
from vae.model.autoencoder import AutoencoderKL as Ours
from vae.system.errors import UserError
from vae.training.run import train

TWICE = replace(SMALL, decoder_scale=2)
SHAPE = ("channels", "layers_per_block", "norm_groups", "z_channels")  # of the file of --init_from
RUN = {name: value for name, value in TINY.items() if name not in SHAPE}


def enlarged(path, scale=2) -> Ours:
    """The VAE at `path` with another scale of the decoder, before training."""
    file = read_vae(path)
    config = replace(load_vae(path).autoencoder.config, decoder_scale=scale)
    file.fit_decoder(config)
    model = Ours(config).eval().requires_grad_(False)
    load_weights(model, file.weights)
    return model


def write(model: Ours, folder):
    save_diffusers_folder(
        folder, stored_weights(model, "fp32"), diffusers_config(model.config, 64, 0.5, 0.25)
    )
    return folder


def trained(tmp_path, shape: ModelConfig = TWICE):
    """A folder of a decoder whose four pixels of a position differ."""
    return write_vae(tmp_path / "twice", shape=shape)


def encode(path, photo, output, *words):
    return run_here("infer_vae.py", "--vae", path, *words, "--input", photo, "--output_dir", output)


# ---- The network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: diffusers_model("sd"), wan_model])
def test_it_begins_as_nearest_enlargement_and_can_be_made_small_again(build, tmp_path):
    build().save_pretrained(tmp_path / "vae")
    before = load_vae(tmp_path / "vae").autoencoder
    twice = enlarged(tmp_path / "vae")
    small = image(32)
    images = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.equal(twice.encoder_input(images), small)
    latents = twice.encode(small).mode()
    assert torch.equal(latents, before.encode(small).mode())
    decoded = before.decode(latents)
    tolerance = 1e-5 * decoded.abs().max()  # fp32: another convolution may sum in another order
    nearest = decoded.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert (twice.decode(latents) - nearest).abs().max() <= tolerance
    assert (twice(images)[0] - nearest).abs().max() <= tolerance
    again = enlarged(write(twice, tmp_path / "twice"), scale=1)
    assert (again.decode(latents) - decoded).abs().max() <= tolerance


def test_a_decoder_that_is_made_small_returns_the_means_of_its_pixels(tmp_path):
    twice = load_vae(trained(tmp_path)).autoencoder
    latents = torch.randn(1, twice.config.z_channels, 5, 6)
    halved = F.avg_pool2d(twice.decode(latents), 2)
    again = enlarged(tmp_path / "twice", scale=1).decode(latents)
    assert (again - halved).abs().max() <= 1e-5 * halved.abs().max()
    assert (twice.decode(latents) - F.interpolate(halved, scale_factor=2)).abs().max() > 0.01


# ---- Files -----------------------------------------------------------------------------------------------

CLASSES = {
    AutoencoderKL: {},
    AutoencoderKLFlux2: {"latent_norm": True, "use_quant_conv": True},
    AsymmetricAutoencoderKL: {"decoder_channels": (32, 64), "use_quant_conv": True},
}


@pytest.mark.parametrize("cls", CLASSES)
def test_diffusers_returns_the_pixels_as_channels(cls, tmp_path):
    shape = ModelConfig(channels=(32, 32), layers_per_block=1, decoder_scale=2, z_channels=4, **CLASSES[cls])
    source, latents = trained(tmp_path, shape), torch.randn(1, 4, 6, 5)
    expected = load_vae(source).autoencoder.decode(latents)
    assert expected.shape == (1, 3, 24, 20)
    export(ExportConfig(vae=(str(source),), output=str(tmp_path / "one.safetensors")))
    export(ExportConfig(vae=(str(tmp_path / "one.safetensors"),), output=str(tmp_path / "folder")))
    theirs, loading = cls.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(loading.values())
    found = F.pixel_shuffle(theirs.eval().decode(latents).sample, 2)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert load_vae(tmp_path / "folder").autoencoder.config == load_vae(source).autoencoder.config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scale"), [("sd", 1), ("wan", 2), ("reflect", 2), ("grey", 1), ("alpha", 2)]
)
def test_the_example_decodes_without_this_project(family, scale, tmp_path, image_folder):
    if channels := {"grey": 1, "alpha": 4}.get(family):
        shape = replace(SMALL, image_channels=channels, decoder_scale=scale)
        write_vae(tmp_path / "scaled", shape=shape)
    else:
        (wan_model() if family == "wan" else diffusers_model("sd")).save_pretrained(tmp_path / "vae")
        model = enlarged(tmp_path / "vae", scale)
        if family == "reflect":
            model.config = replace(model.config, padding="reflect")
        write(model, tmp_path / "scaled")
    photo = image_folder / "image_00.png"
    for mode, words in (("encode", [photo]), ("decode", [tmp_path / "encode" / "image_00.safetensors"])):
        done = encode(tmp_path / "scaled", *words, tmp_path / mode, "--mode", mode, "--any_vae")
        assert done.returncode == 0, done.stderr
    latents, output = tmp_path / "encode" / "image_00.safetensors", tmp_path / "out.png"
    done = run_script("examples/decode_latents.py", *map(str, (tmp_path / "scaled", latents, output)))
    assert done.returncode == 0, done.stderr
    found = np.asarray(Image.open(output)).astype(int)
    expected = np.asarray(Image.open(tmp_path / "decode" / "image_00.png")).astype(int)
    found = found[: expected.shape[0], : expected.shape[1]]  # it does not remove padding
    assert np.abs(found - expected).max() <= 1
    assert expected.shape[1] == scale * Image.open(photo).width


# ---- Use -------------------------------------------------------------------------------------------------


def test_infer_keeps_latents_and_the_size_of_reconstructions(tmp_path, image_folder):
    tiles = ("--tiles", "blended", "--tile_size", "64")
    write_vae(tmp_path / "once")
    write(enlarged(tmp_path / "once"), tmp_path / "twice")
    photo = tmp_path / "odd.png"
    Image.open(image_folder / "image_00.png").crop((0, 0, 37, 23)).save(photo)
    for name in ("once", "twice"):
        for mode in ("encode", "reconstruct"):
            done = encode(tmp_path / name, photo, tmp_path / name / mode, "--mode", mode, *tiles)
            assert done.returncode == 0, done.stderr
    once, twice = (load_file(tmp_path / name / "encode" / "odd.safetensors") for name in ("once", "twice"))
    assert torch.equal(once["latents"], twice["latents"])
    assert Image.open(tmp_path / "twice" / "reconstruct" / "odd.png").size == (37, 23)
    latents = tmp_path / "once" / "encode" / "odd.safetensors"  # those of the VAE whose decoder is replaced
    for name in ("once", "twice"):
        done = encode(tmp_path / name, latents, tmp_path / name / "decode", "--mode", "decode", *tiles)
        assert done.returncode == 0, done.stderr
    small, large = (Image.open(tmp_path / name / "decode" / "odd.png") for name in ("once", "twice"))
    assert (small.size, large.size) == ((37, 23), (74, 46))
    nearest = np.asarray(small).repeat(2, 0).repeat(2, 1).astype(int)
    assert np.abs(nearest - np.asarray(large)).max() <= 1


def test_evaluation_measures_all_pixels(tmp_path, image_folder):
    model = load_vae(trained(tmp_path)).autoencoder
    options = {"device": "cpu", "crop": "center", "perceptual_net": "none"}
    results = vae.evaluate(tmp_path / "twice", image_folder, tmp_path / "results", sizes=[32], **options)
    (row,) = [row for row in results.vaes if row.is_network]
    photo = Image.open(image_folder / "image_00.png")
    left, top = (photo.width - 32) // 2, (photo.height - 32) // 2
    crop = np.array(photo.crop((left, top, left + 32, top + 32)))
    images = torch.from_numpy(crop).permute(2, 0, 1)[None] / 127.5 - 1
    error = (model(images)[0].clamp(-1, 1) - images) * 127.5
    expected = 10 * torch.log10(255**2 / error.square().mean()).item()
    assert row.sizes[0].per_image["image_00.png"]["psnr"] == pytest.approx(expected, abs=0.05)  # rounded
    assert row.latents.downsampling == 8
    assert "bicubic 8x" in [row.name for row in results.vaes]


# ---- Training --------------------------------------------------------------------------------------------


def test_a_decoder_that_is_enlarged_is_trained_as_a_warm_start(tmp_path):
    """A trained VAE gets a rate at which four pixels of a position hardly become different."""
    for file, scale in ((read_vae(write_vae(tmp_path / "vae")), 2), (read_vae(trained(tmp_path)), 1)):
        file.fit_decoder(replace(SMALL, decoder_scale=scale))
        assert file.is_trained == (scale == 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["decoder", "all"])
def test_training(part, tmp_path, image_folder, capsys):
    source = write_vae(tmp_path / "vae", shape=replace(SMALL, channels=(16, 32)))
    given = {**RUN, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    begun = {"init_from": str(source), "train_part": part, "decoder_scale": 2, "learning_rate": 1e-3}
    losses = {
        "perceptual_net": "random",
        "perceptual_weight": 1.0,
        "adversarial_weight": 0.1,
        "disc_start": 1,
        "disc_warmup": 0,
    }
    losses |= {"disc_channels": 16, "disc_layers": 1, "save_samples_freq": 1}
    losses |= {"buckets": 3} if part == "decoder" else {"equivariance_weight": 0.5}
    assert train({**given, **begun, **losses, "num_epochs": 2}) == 0
    printed = capsys.readouterr().out
    assert "2x downsampling, decoded at 2 times the size (the encoder reads crops at 1/2)" in printed
    assert "4x bicubic" in printed
    assert records(tmp_path / "run", "validation")[-1]["psnr"] > 0
    before, after = load_vae(source), load_vae(tmp_path / "run" / "vae")
    assert after.autoencoder.config.up_scale == 2
    same = torch.equal(before.autoencoder.encode(image()).mode(), after.autoencoder.encode(image()).mode())
    assert same == (part == "decoder")
    rows = after.autoencoder.decoder.conv_out.weight.unflatten(0, (3, 4))
    assert (rows - rows[:, :1]).abs().max() > 0  # the pixels of a position have become different
    resumed = {**RUN, "data_path": str(image_folder), "output_dir": str(tmp_path / "run")}
    assert train({**resumed, "resume_from": "latest", "num_epochs": 1, "new_stage": True}) == 0
    assert last_checkpoint(tmp_path / "run")["config"]["decoder_scale"] == 2
    once = {**RUN, "data_path": str(image_folder), "output_dir": str(tmp_path / "once"), "decoder_scale": 1}
    assert train({**once, "init_from": str(tmp_path / "run" / "vae"), "num_epochs": 1}) == 0
    assert load_vae(tmp_path / "once" / "vae").autoencoder.config.up_scale == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"image_size": 40},
            r"^--image_size 40 is not a multiple of 16: try 32 or 48",
        ),  # of eight without it
        ({"image_size": 64}, r"^.*40.* is below --image_size 64"),
        ({"decoder": "tiny"}, r"^--decoder tiny has the scale 1: omit --decoder_scale 2"),
    ],
)
def test_mistakes_are_named(given, message, tmp_path, image_folder):
    source = write_vae(tmp_path / "vae", shape=replace(SMALL, channels=(8, 16, 16, 16), norm_groups=4))
    run = {"data_path": str(image_folder), "output_dir": str(tmp_path / "run"), "init_from": str(source)}
    with pytest.raises(UserError, match=message):
        train({**RUN, **run, "train_part": "decoder", "decoder_scale": 2, **given})
