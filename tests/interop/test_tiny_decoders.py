"""Tiny decoders: trained on the latents of a VAE, and written for diffusers and ComfyUI."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from safetensors.torch import load_file

from tests.harness.runs import TINY
from tests.harness.training_runs import last_checkpoint, records
from tests.harness.vae_families import diffusers_model, image
from tests.harness.wan_models import wan_model
from vae.config.model_options import ModelConfig
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.interop.writing import diffusers_config, save_diffusers_folder
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import UserError
from vae.training.run import train

SHAPE = ("channels", "norm_groups", "layers_per_block", "z_channels")  # of the file of --init_from
RUN = {name: value for name, value in TINY.items() if name not in SHAPE}
RUN |= {"train_part": "decoder", "decoder": "tiny", "num_epochs": 1, "max_steps": 4}


def train_tiny(teacher, image_folder, folder, **options) -> None:
    teacher.save_pretrained(folder / "teacher")
    given = {"data_path": str(image_folder), "init_from": str(folder / "teacher")}
    assert train({**RUN, **given, "output_dir": str(folder / "run"), **options}) == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sd3", "wan", "flux2"])
def test_diffusers_decodes_the_exported_folder_to_our_images(family, image_folder, tmp_path, capsys):
    teacher = wan_model() if family == "wan" else diffusers_model(family, (32, 32, 64, 64), 1)
    if family == "flux2":  # statistics that do not depend on the position in a patch
        for values in (teacher.bn.running_mean, teacher.bn.running_var):
            values.copy_(values.view(-1, 4)[:, :1].expand(-1, 4).flatten())
    train_tiny(teacher, image_folder, tmp_path)
    before, loaded = load_vae(tmp_path / "teacher"), load_vae(tmp_path / "run" / "vae")
    ours, latents = loaded.autoencoder, before.autoencoder.encode(image()).mode()
    assert torch.equal(ours.encode(image()).mode(), latents)
    for output in ("folder", "one.safetensors"):
        export(ExportConfig(vae=(str(tmp_path / "run" / "vae"),), output=str(tmp_path / output)))

    theirs, loading = AutoencoderTiny.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(loading.values())
    normalized = (latents - ours.decoder.latents_mean[:, None, None]) / ours.decoder.latents_std[
        :, None, None
    ]
    norm = before.autoencoder.bn
    if norm is not None:
        torch.testing.assert_close(normalized, F.pixel_shuffle(norm.normalize(latents), norm.patch))
    else:
        expected = (latents - (before.shift_factor or 0)) * before.scaling_factor
        torch.testing.assert_close(normalized, expected)
    expected = theirs.eval().decode(normalized).sample
    assert (ours.decode(latents) - expected).abs().max() < 1e-5
    said = {
        "sd": "(z - 0) * 0.18215",
        "sd3": "(z - 0.0609) * 1.5305",
        "wan": "(z - latents_mean) / latents_std",
        "flux2": "(z - latents_mean) / latents_std",
    }
    printed = capsys.readouterr()
    command = f"python export_vae.py --vae {tmp_path / 'run' / 'vae'} --output exported/run"
    assert f"for other programs: {command}\n" in printed.out
    assert f"as diffusion models have them: {said[family]}" in printed.out
    assert ("taef2" in printed.out + printed.err) == (family == "flux2")

    single = load_file(tmp_path / "one.safetensors")  # taesd's first layer has no weights
    folder = load_file(tmp_path / "folder" / WEIGHTS_NAME)
    assert single.keys() >= {"1.weight", "3.conv.0.weight", "7.weight", "18.conv.4.bias", "19.bias"}
    for name, value in single.items():
        index, _, rest = name.partition(".")
        assert torch.equal(value, folder[f"decoder.layers.{int(index) - 1}.{rest}"]), name
    assert len(single) == sum(name.startswith("decoder.") for name in folder)
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["latent_channels"] == len(latents[0])


def test_wrong_uses_name_their_flag(image_folder, tmp_path):
    teacher = diffusers_model("sd", (32, 32), 1)
    for wrong in ({"train_part": "all"}, {"decoder_channels": (8, 16)}):
        with pytest.raises(UserError, match=r"^--decoder tiny "):
            train_tiny(teacher, image_folder, tmp_path, **wrong)
    weights = (tmp_path / "teacher" / WEIGHTS_NAME).rename(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"^--init_from .*scaling"):
        train_tiny(teacher, image_folder, tmp_path, init_from=str(weights))
    shape = ModelConfig(channels=(8, 8), norm_groups=4, layers_per_block=1, decoder="tiny")
    export_of = {"vae": (str(tmp_path / "tiny"),), "output": str(tmp_path / "out")}
    model = AutoencoderKL(shape)
    save_diffusers_folder(tmp_path / "tiny", model.state_dict(), diffusers_config(shape, 32, 0.5, 0.0))
    assert load_vae(tmp_path / "tiny").autoencoder.config == shape
    with pytest.raises(UserError, match=r"^--add_quant_conv"):
        export(ExportConfig(**export_of, add_quant_conv=True))
    export(ExportConfig(**export_of))
    with pytest.raises(UserError, match="AutoencoderTiny"):
        load_vae(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("computes_fp16")
def test_what_overflows_fp16_is_scaled(image_folder, tmp_path, capsys):
    """An activation of 60,000 in the frozen encoder: fp16 ends at 65,504."""
    vae = diffusers_model("sd", (32, 32), 1)
    vae.encoder.mid_block.resnets[1].conv1.bias[3] += 6e4
    train_tiny(vae, image_folder, tmp_path, mixed_precision=True, max_steps=2)
    assert " in encoder.mid_block.resnets.1.conv1\n" in capsys.readouterr().out
    content = last_checkpoint(tmp_path / "run")
    assert (content["fp16"], content["activation_scale"]) == (True, 1 / 8)
    assert all(math.isfinite(record["loss"]) for record in records(tmp_path / "run", "train"))
