"""The largest activation is found where it is, and judged beside fp16's largest number."""

import json

import pytest
import torch

from tests.harness.vae_families import SMALL, diffusers_model, image
from vae.config.export_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.half_precision import FP16_LARGEST, LargestActivation, largest_activation
from vae.interop.vae_files import load_vae


@pytest.fixture
def model(tmp_path):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "theirs")
    return load_vae(tmp_path / "theirs").autoencoder


def test_an_activation_is_found_in_the_module_that_makes_it(model):
    quiet = largest_activation(model, [image()])
    assert 0 < quiet.value < 1000
    model.decoder.mid_block.resnets[1].conv1.bias[3] = 7e4
    found = largest_activation(model, [image()])
    assert found.module == "decoder.mid_block.resnets.1.conv1"
    assert found.value == pytest.approx(7e4, rel=0.01)
    # and fp16 does overflow there
    half = torch.float16
    with torch.no_grad():
        hidden = model.decoder.mid_block(model.decoder.conv_in(torch.zeros(1, 4, 32, 32, dtype=half)))
    assert not torch.isfinite(hidden).all()


def test_hooks_do_not_stay(model):
    largest_activation(model, [image()])
    assert not any(part._forward_hooks for part in model.modules())


def test_half_of_fp16_is_near():
    assert not LargestActivation(0.49 * FP16_LARGEST, "a").is_near
    assert LargestActivation(0.5 * FP16_LARGEST, "a").is_near
    assert LargestActivation(float("inf"), "a").is_near
    assert "WARNING" in LargestActivation(6e4, "decoder.conv_in").line()
    assert "decoder.conv_in" in LargestActivation(6e4, "decoder.conv_in").line()


@pytest.mark.parametrize(("bias", "upcast"), [(0.0, False), (5e4, True)])
def test_the_config_asks_for_fp32_where_fp16_overflows(bias, upcast, tmp_path, image_folder):
    theirs = diffusers_model("sd", *SMALL)
    theirs.decoder.mid_block.resnets[1].conv1.bias[3] += bias
    theirs.save_pretrained(tmp_path / "theirs")
    lines = []
    options = {"data_path": str(image_folder), "image_size": 32, "dtype": "fp16"}
    paths = {"vae": (str(tmp_path / "theirs"),), "output": str(tmp_path / "out")}
    export(ExportConfig(**paths, **options), say=lines.append)
    assert any(line.startswith("WARNING: the largest activation") for line in lines) is upcast
    assert json.loads((tmp_path / "out" / "config.json").read_text())["force_upcast"] is upcast


def test_an_untried_fp16_export_says_so(tmp_path):
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "theirs")
    lines = []
    paths = {"vae": (str(tmp_path / "theirs"),), "output": str(tmp_path / "out")}
    export(ExportConfig(**paths, dtype="fp16"), say=lines.append)
    assert any("was not tried" in line for line in lines)
