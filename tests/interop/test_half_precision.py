"""The largest activation is located and compared with fp16's maximum."""

import json

import pytest
import torch

from tests.harness.vae_families import SMALL, diffusers_model, image
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae
from vae.model.activation_scale import FP16_MAX, LargestActivation, largest_activation


@pytest.fixture
def model(tmp_path):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "theirs")
    return load_vae(tmp_path / "theirs").autoencoder


def test_largest_activation_reports_value_and_module(model):
    quiet = largest_activation(model, [image()])
    assert 0 < quiet.value < 1000
    block = model.decoder.mid_block.resnets[1]
    block.conv1.bias[3] = 7e4
    found = largest_activation(model, [image()])
    assert found.module == "decoder.mid_block.resnets.1.conv1"
    assert found.value == pytest.approx(7e4, rel=0.01)
    # fp16 overflows there in programs that compute layer by layer
    with torch.no_grad():
        hidden = torch.zeros(1, block.norm1.num_channels, 8, 8, dtype=torch.float16)
        hidden = block.conv1(block.norm1(hidden))
    assert not torch.isfinite(hidden).all()


def test_hooks_are_removed(model):
    largest_activation(model, [image()])
    assert not any(part._forward_hooks for part in model.modules())


def test_half_of_fp16_maximum_is_the_limit():
    assert not LargestActivation(0.49 * FP16_MAX, "a").may_overflow_fp16
    assert LargestActivation(0.5 * FP16_MAX, "a").may_overflow_fp16
    assert LargestActivation(float("inf"), "a").may_overflow_fp16
    assert (
        "decoder.conv_in: run this VAE in bf16 or fp32" in LargestActivation(6e4, "decoder.conv_in").summary()
    )


@pytest.mark.parametrize(("bias", "upcast"), [(0.0, False), (5e4, True)])
def test_force_upcast_is_set_if_fp16_may_overflow(bias, upcast, tmp_path, image_folder, capsys):
    theirs = diffusers_model("sd", *SMALL)
    theirs.decoder.mid_block.resnets[1].conv1.bias[3] += bias
    theirs.save_pretrained(tmp_path / "theirs")
    options = {"data_path": str(image_folder), "image_size": 32, "dtype": "fp16"}
    paths = {"vae": (str(tmp_path / "theirs"),), "output": str(tmp_path / "out")}
    export(ExportConfig(**paths, **options))
    assert ("WARNING: the largest activation" in capsys.readouterr().out) is upcast
    assert json.loads((tmp_path / "out" / "config.json").read_text())["force_upcast"] is upcast


def test_fp16_export_without_images_warns(tmp_path, capsys):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "theirs")
    paths = {"vae": (str(tmp_path / "theirs"),), "output": str(tmp_path / "out")}
    export(ExportConfig(**paths, dtype="fp16"))
    out = capsys.readouterr().out
    assert "WARNING" in out
    assert "--data_path" in out
