"""Decoders of another shape than their encoder, and middle blocks without attention."""

import shutil

import pytest
import torch
from diffusers import AsymmetricAutoencoderKL, AutoencoderKL, AutoencoderKLFlux2
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.harness.runs import TINY, run_here
from tests.harness.small_vae import write_vae
from tests.harness.vae_families import image, randomize_norms
from vae.config.model_options import ModelConfig
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import diffusers_config, save_diffusers_folder
from vae.model.autoencoder import AutoencoderKL as Ours
from vae.model.initialization import initialize
from vae.system.errors import UserError
from vae.training.run import train

LEVELS = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}


def small_flux2() -> AutoencoderKLFlux2:
    """The form of FLUX.2-small-decoder."""
    widths = {"block_out_channels": (32, 64, 64), "decoder_block_out_channels": (32, 32, 64)}
    return AutoencoderKLFlux2(**LEVELS, **widths, layers_per_block=1, latent_channels=8)


def asymmetric() -> AsymmetricAutoencoderKL:
    down = {"down_block_out_channels": (32, 32, 64), "layers_per_down_block": 1}
    up = {"up_block_out_channels": (32, 64, 96), "layers_per_up_block": 2}
    return AsymmetricAutoencoderKL(**LEVELS, **down, **up, scaling_factor=0.5)


def without_attention() -> AutoencoderKL:
    shape = {"block_out_channels": (32, 32, 64), "layers_per_block": 1, "mid_block_add_attention": False}
    return AutoencoderKL(**LEVELS, **shape, scaling_factor=0.5)


@pytest.mark.parametrize("build", [small_flux2, asymmetric, without_attention])
def test_other_shapes_are_read_and_written(build, tmp_path):
    torch.manual_seed(0)
    theirs = randomize_norms(build())
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(image()).sample
    for output in ("folder", "one.safetensors", "back"):
        source = {"folder": "theirs", "one.safetensors": "folder", "back": "one.safetensors"}[output]
        export(ExportConfig(vae=(str(tmp_path / source),), output=str(tmp_path / output)))
        ours = load_vae(tmp_path / output).autoencoder
        assert (ours(image())[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    after, loading = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(loading.values())
    assert torch.equal(after.eval()(image()).sample, expected)
    assert ours.config.mid_attention == (build is not without_attention)


@pytest.mark.slow
@pytest.mark.parametrize("build", [small_flux2, asymmetric])
def test_diffusers_computes_the_images_of_a_trained_decoder(build, image_folder, tmp_path):
    torch.manual_seed(0)
    theirs = randomize_norms(build())
    theirs.save_pretrained(tmp_path / "theirs")
    shape = ("channels", "norm_groups", "layers_per_block", "z_channels")  # of the file
    given = {name: value for name, value in TINY.items() if name not in shape}
    given |= {"train_part": "decoder", "learning_rate": 1e-3, "num_epochs": 1, "max_steps": 4}
    given |= {"data_path": str(image_folder), "init_from": str(tmp_path / "theirs")}
    assert train({**given, "output_dir": str(tmp_path / "run")}) == 0
    export(ExportConfig(vae=(str(tmp_path / "run" / "vae"),), output=str(tmp_path / "out")))
    after, loading = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    expected = after.eval()(image()).sample
    recon = load_vae(tmp_path / "run" / "vae").autoencoder(image())[0]
    assert (recon - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (theirs(image()).sample - expected).abs().max() > 1e-3  # the decoder was trained
    assert torch.equal(theirs.encode(image()).latent_dist.mode(), after.encode(image()).latent_dist.mode())


def test_a_shape_without_a_class_of_diffusers_is_kept(tmp_path):
    shape = ModelConfig(
        channels=(8, 16),
        decoder_channels=(4, 8),
        decoder_layers_per_block=3,
        layers_per_block=1,
        norm_groups=4,
    )
    weights = Ours(shape).state_dict()
    config = diffusers_config(shape, 32, 0.5, 0.25)
    save_diffusers_folder(tmp_path / "vae", weights, config)
    loaded = load_vae(tmp_path / "vae")
    assert loaded.autoencoder.config == shape
    assert (loaded.scaling_factor, loaded.shift_factor) == (0.5, 0.25)
    with pytest.raises(UserError, match=r"^--decoder_channels has 1 levels, and --channels 2: give as many"):
        Ours(ModelConfig(channels=(8, 16), decoder_channels=(8,), norm_groups=4))
    with pytest.raises(UserError, match=r"^--decoder_channels 6 is not a multiple"):
        Ours(ModelConfig(channels=(8, 16), decoder_channels=(6, 8), norm_groups=4))


def test_warm_start_of_a_narrow_decoder_is_a_codec():
    narrow = ModelConfig(
        channels=(32, 64, 64), decoder_channels=(16, 32, 32), norm_groups=4, layers_per_block=1
    )
    model = Ours(narrow)
    initialize(model, "warm", 0)
    with torch.no_grad():
        error = (model(image())[0] - image()).square().mean()
    assert error < 0.05 * image().var()


def without(part: str, folder, tmp_path):
    """A copy of a VAE's folder without one part."""
    copied = tmp_path / f"no_{part}"
    shutil.copytree(folder, copied)
    weights = load_file(folder / WEIGHTS_NAME)  # not of the copy: Windows does not replace a mapped file
    kept = {name: value for name, value in weights.items() if part not in name.partition(".")[0]}
    save_file(kept, copied / WEIGHTS_NAME)
    return copied


@pytest.mark.parametrize("build", [asymmetric, without_attention])
def test_one_part_alone_encodes_or_decodes(build, tmp_path):
    randomize_norms(build()).save_pretrained(tmp_path / "vae")
    whole = load_vae(tmp_path / "vae").autoencoder
    decoder = load_vae(without("encoder", tmp_path / "vae", tmp_path), needs=("decoder",))
    latents = torch.randn(1, whole.config.z_channels, 5, 6)
    assert not decoder.has_encoder
    assert torch.equal(decoder.autoencoder.decode(latents), whole.decode(latents))
    encoder = load_vae(without("decoder", tmp_path / "vae", tmp_path), needs=("encoder",)).autoencoder
    assert torch.equal(encoder.encode(image()).mean, whole.encode(image()).mean)


def test_infer_uses_the_part_that_a_file_has(tmp_path, image_folder):
    write_vae(tmp_path / "vae")
    encoder, decoder = (without(part, tmp_path / "vae", tmp_path) for part in ("decoder", "encoder"))
    photo = image_folder / "image_00.png"

    def infer(mode, vae, given, output):
        words = ("--mode", mode, "--vae", vae, "--input", given, "--output_dir", tmp_path / output)
        return run_here("infer_vae.py", *words, "--device", "cpu")

    assert infer("encode", encoder, photo, "latents").returncode == 0
    done = infer("decode", decoder, tmp_path / "latents", "decoded")
    assert done.returncode == 0
    assert "has no encoder: whether it made the latents is not checked" in done.stdout
    assert infer("reconstruct", tmp_path / "vae", photo, "whole").returncode == 0
    images = [Image.open(tmp_path / name / "image_00.png").tobytes() for name in ("decoded", "whole")]
    assert images[0] == images[1]
    refused = infer("reconstruct", decoder, photo, "none")
    assert refused.returncode == 78
    assert f"--vae {decoder} has no encoder: it can only decode latents" in refused.stderr
