"""Scaled activations change no image, no latent and no gradient."""

import json

import pytest
import torch

from tests.harness.vae_families import SMALL, diffusers_model, image
from vae.config.model_options import ModelConfig
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.vae_files import load_vae
from vae.model.activation_scale import (
    FP16_MAX,
    MIN_SCALE,
    TARGET,
    LargestActivation,
    largest_activation,
    scale_activations,
    scale_for,
)
from vae.model.autoencoder import AutoencoderKL, set_recompute

SCALE = 1 / 64


def model_of(**shape: object) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, **shape))


def computed(model: AutoencoderKL, dtype: torch.dtype) -> list[torch.Tensor]:
    """Image, mean and log-variance, then the gradient of each parameter."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(2, 3, 16, 16, generator=generator).mul(2).sub(1).to(dtype)
    noise = torch.randn(2, model.config.z_channels, 8, 8, generator=generator).to(dtype)
    model.zero_grad()
    outputs = model(images, noise)
    sum(output.float().square().mean() for output in outputs).backward()
    return [*outputs, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"padding": "reflect"}, {"family": "wan"}, {"mid_attention": False}, {"decoder": "tiny"}],
    ids=str,
)
def test_scaled_activations_change_nothing_else(shape, recompute):
    model = model_of(**shape)
    set_recompute(model, recompute)
    expected = computed(model, torch.float32)
    scale_activations(model, SCALE)
    for found, wanted in zip(computed(model, torch.float32), expected, strict=True):
        assert torch.equal(found, wanted)
    scale_activations(model, 1.0)
    assert torch.equal(computed(model, torch.float32)[0], expected[0])


def test_activations_beyond_fp16_are_computed_in_it():
    """In fp16 the network without a scale gives no finite image."""
    model = model_of()
    with torch.no_grad():
        model.decoder.conv_in.weight *= 3e5
        model.decoder.mid_block.resnets[0].conv1.bias += 5e5
    expected = computed(model, torch.float32)
    assert not computed(model, torch.float16)[0].isfinite().all()
    crops = [torch.zeros(1, 3, 16, 16)]
    largest = largest_activation(model, crops).value
    scale_activations(model, scale_for(largest))
    assert TARGET / 2 < largest_activation(model, crops).value <= TARGET
    found = computed(model, torch.float16)
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[0].float(), expected[0], rtol=0.02, atol=0.02)


def test_scales_stop_where_weights_lose_precision_in_fp16():
    """Of a block as wide as the default network: its weights have a median of 0.0074."""
    torch.manual_seed(0)
    model = AutoencoderKL(ModelConfig(channels=(512,), layers_per_block=1, mid_attention=False))
    images = torch.rand(1, 3, 4, 4)

    @torch.no_grad()
    def error(scale: float) -> float:
        scale_activations(model, scale)
        mean = model.encode(images.half()).mean
        return ((mean - expected).norm() / expected.norm()).item()

    with torch.no_grad():
        expected = model.encode(images).mean
    unscaled = error(1.0)
    assert error(scale_for(FP16_MAX)) < 1.1 * unscaled
    assert error(scale_for(1e12)) < 1.2 * unscaled  # 1.11 on a CPU that multiplies fp16 itself
    assert error(MIN_SCALE / 32) > 2 * unscaled


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
