"""The diffusers folder: diffusers loads the export of a run, and a run starts from published folders."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL as DiffusersVAE
from PIL import Image
from safetensors.torch import load, load_file, save_file

from tests.harness.faults import limit_file_size
from tests.harness.runs import TINY
from tests.harness.small_vae import SMALL as SMALL_VAE
from tests.harness.small_vae import write_vae
from vae.config.model_options import ModelConfig
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import write_safetensors
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import UserError
from vae.training.distributed import Distributed
from vae.training.early_checks import Command
from vae.training.run import train
from vae.training.setup import prepare_run

MODEL = ModelConfig(channels=(32, 64), layers_per_block=1, z_channels=4, use_quant_conv=True)
CPU = Distributed(0, 1, torch.device("cpu"))


def photograph(height: int = 48, width: int = 64) -> torch.Tensor:
    """(1, 3, H, W) in [-1, 1]: a smooth seeded image with texture."""
    random = np.random.default_rng(3)
    coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    noisy = np.clip(smooth + random.normal(0, 8, smooth.shape), 0, 255)
    return torch.from_numpy(noisy).permute(2, 0, 1)[None].float() / 127.5 - 1


@pytest.fixture(scope="module")
def exported(image_folder, tmp_path_factory) -> Path:
    """OUTPUT_DIR/vae of a short real run."""
    output = tmp_path_factory.mktemp("exported") / "run"
    given = {**TINY, "init": "default", "data_path": str(image_folder), "output_dir": str(output)}
    assert train({**given, "num_epochs": 4, "learning_rate": 1e-3, "val_split": 0.0}) == 0
    return output / "vae"


@pytest.fixture
def published(tmp_path) -> Path:
    """A published VAE, written by diffusers."""
    torch.manual_seed(0)
    folder = tmp_path / "published"
    DiffusersVAE(
        block_out_channels=MODEL.channels,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=MODEL.layers_per_block,
        latent_channels=MODEL.z_channels,
    ).save_pretrained(folder)
    return folder


def read_model(path: Path) -> AutoencoderKL:
    return load_vae(path, flag="--init_from").autoencoder


# --- the export of a run ------------------------------------------------------------------------


def test_diffusers_gives_the_same_reconstruction(exported):
    theirs, ours = DiffusersVAE.from_pretrained(exported), read_model(exported)
    images = photograph()
    with torch.no_grad():
        expected, found = theirs(images).sample, ours(images)[0]
    assert (found - expected).abs().max() < 1e-5 * 2  # 1e-5 of the value range [-1, 1], fp32


def test_exported_weights_are_the_ema_weights(exported):
    saved = torch.load(exported.parent / "checkpoint_epoch_4.pt", weights_only=True)
    written = load_file(exported / WEIGHTS_NAME)
    assert written.keys() == saved["ema"].keys()
    for name, value in written.items():
        assert torch.equal(value, saved["ema"][name]), name
    assert any(not torch.equal(written[name], saved["model"][name]) for name in written)


def test_scaled_latents_have_mean_0_and_std_1(exported, image_folder):
    model = DiffusersVAE.from_pretrained(exported)
    generator = torch.Generator().manual_seed(0)
    latents = []
    for path in sorted(image_folder.rglob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            posterior = model.encode(pixels[:, :, :32, :32]).latent_dist
        latents.append(posterior.sample(generator))
    scaled = (torch.cat(latents) - model.config.shift_factor) * model.config.scaling_factor
    # the stored statistics are from other crops of the same 16 images
    assert abs(float(scaled.mean())) < 0.1
    assert float(scaled.std()) == pytest.approx(1, abs=0.1)


# --- starting from published folders ---------------------------------------------------------------


def first_forward(init_from: Path, tiny: dict, **given) -> torch.Tensor:
    """Reconstruction of the initial network of a run with --init_from."""
    options = {k: v for k, v in tiny.items() if k not in ("channels", "layers_per_block", "norm_groups")}
    options = {k: v for k, v in options.items() if k != "z_channels"}
    state = prepare_run(Command({**options, "init_from": str(init_from), **given}), CPU).state
    with torch.no_grad():
        assert torch.equal(state.ema(photograph())[0], state.autoencoder(photograph())[0])
        return state.autoencoder(photograph())[0]


def expected_forward(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return DiffusersVAE.from_pretrained(folder)(photograph()).sample


def assert_near(found, expected):
    assert (found - expected).abs().max() < 1e-5 * (expected.max() - expected.min())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limits of file sizes")
def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(tmp_path):
    path = tmp_path / "vae.safetensors"
    limit_file_size(1000)
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_safetensors(path, {"weight": torch.zeros(1000)}, {})
    finally:
        limit_file_size(None)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert list(tmp_path.iterdir()) == []


def test_starts_from_a_published_folder_or_its_file(published, tiny):
    expected = expected_forward(published)
    assert_near(first_forward(published, tiny), expected)
    assert_near(first_forward(published / WEIGHTS_NAME, tiny), expected)
    half = {name: value.half() for name, value in load_file(published / WEIGHTS_NAME).items()}
    save_file(half, published / "half.safetensors")  # computed in fp32
    theirs = DiffusersVAE.from_pretrained(published)
    theirs.load_state_dict({name: value.float() for name, value in half.items()})
    with torch.no_grad():
        assert_near(first_forward(published / "half.safetensors", tiny), theirs(photograph()).sample)


def test_starts_from_the_export_of_a_run(exported, tiny):
    """Its folder, the folder of the run, and the file, whose norm groups are in the config.json beside it."""
    expected = expected_forward(exported)
    for path in (exported, exported.parent, exported / WEIGHTS_NAME):
        assert_near(first_forward(path, tiny), expected)


@pytest.mark.parametrize("convolutions", [False, True])
def test_starts_from_old_attention_names(published, tiny, convolutions):
    expected = expected_forward(published)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = {}
    for name, value in load_file(published / WEIGHTS_NAME).items():
        for new_name, old_name in old.items():
            name = name.replace(f"attentions.0.{new_name}.", f"attentions.0.{old_name}.")
        if convolutions and ".attentions.0." in name and value.dim() == 2:
            value = value[:, :, None, None].contiguous()
        weights[name] = value
    assert sum(".query." in name for name in weights) == 4
    folder = published.with_name("old")  # Windows replaces no mapped file
    folder.mkdir()
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    save_file(weights, folder / WEIGHTS_NAME)
    assert_near(first_forward(folder, tiny), expected)


def test_folder_without_weights_is_an_error_and_a_pickle_is_read(published):
    weights = load((published / WEIGHTS_NAME).read_bytes())  # not mapped: Windows would keep the file
    (published / WEIGHTS_NAME).unlink()
    with pytest.raises(UserError, match=WEIGHTS_NAME):
        read_model(published)
    torch.save(weights, published / "diffusion_pytorch_model.bin")
    read_model(published)


@pytest.mark.parametrize(("flag", "value"), [("z_channels", 8), ("channels", [32, 96])])
def test_flag_that_contradicts_the_vae_is_an_error(published, tiny, flag, value):
    with pytest.raises(UserError, match=f"--{flag}") as caught:
        first_forward(published, tiny, **{flag: value})
    assert "--init_from" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_padding_is_in_every_format_and_a_warning_names_other_programs(tmp_path, capsys):
    write_vae(tmp_path / "vae", shape=replace(SMALL_VAE, padding="reflect"))
    for output in ("folder", "one.safetensors"):
        export(ExportConfig(vae=(str(tmp_path / "vae"),), output=str(tmp_path / output)))
        assert "--padding reflect: other programs pad with zeros" in capsys.readouterr().out
        assert load_vae(tmp_path / output).autoencoder.config.padding == "reflect"
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | {"padding_mode": "circular"}))
    with pytest.raises(UserError, match="padding_mode circular is neither zeros nor reflect"):
        load_vae(tmp_path / "folder")
