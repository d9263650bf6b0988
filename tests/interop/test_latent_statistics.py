"""Latent statistics equal those of samples; folded weights match fixed constants and give the same images."""

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors import safe_open

from tests.harness.vae_families import SMALL, diffusers_model, image
from vae.config.declare import PUBLISHED_SCALING
from vae.config.trained_vae_flags import ExportConfig
from vae.interop.exporting import export
from vae.interop.latent_statistics import LatentStatistics, LatentSums, sums_of
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.model.autoencoder import LatentNorm, Posterior
from vae.system.errors import UserError


def posteriors(count: int, channels: int = 3) -> list[Posterior]:
    generator = torch.Generator().manual_seed(0)
    offset = torch.tensor([5.0, -2.0, 0.1])[:, None, None]
    size = torch.tensor([0.1, 3.0, 1.0])[:, None, None]
    return [
        Posterior(
            torch.randn(2, channels, 6, 4, generator=generator) * size + offset,
            torch.randn(2, channels, 6, 4, generator=generator) - 2,
        )
        for _ in range(count)
    ]


def statistics_of(parts) -> LatentStatistics:
    latents, _ = sums_of(parts, None)
    return latents.statistics()


def test_statistics_match_many_samples():
    parts = posteriors(4)
    found = statistics_of(parts)
    generator = torch.Generator().manual_seed(1)
    samples = torch.cat(
        [p.sample(torch.randn(p.mean.shape, generator=generator)) for p in parts for _ in range(500)]
    )
    assert torch.allclose(found.mean, samples.mean((0, 2, 3)).double(), atol=0.01)
    assert torch.allclose(found.std, samples.std((0, 2, 3)).double(), rtol=0.01)
    assert found.shift == pytest.approx(samples.mean().item(), abs=0.01)
    assert found.scaling == pytest.approx(1 / samples.std().item(), rel=0.01)


def test_statistics_do_not_depend_on_batching():
    parts = posteriors(4)
    whole = Posterior(torch.cat([p.mean for p in parts]), torch.cat([p.logvar for p in parts]))
    one, other = statistics_of(parts), statistics_of([whole])
    assert torch.allclose(one.mean, other.mean, rtol=1e-12)
    assert torch.allclose(one.std, other.std, rtol=1e-12)
    assert one.count == other.count == 4 * 2 * 6 * 4


def test_large_mean_does_not_hide_small_std():
    generator = torch.Generator().manual_seed(0)
    mean = 1000 + 0.01 * torch.randn(1, 1, 100, 100, generator=generator, dtype=torch.float64)
    sums = LatentSums()
    sums.add(mean, torch.full_like(mean, -30.0))
    assert sums.statistics().std.item() == pytest.approx(
        0.01, rel=0.02
    )  # fp32 sums would give only rounding noise


def test_patches_exclude_an_odd_border():
    part = Posterior(torch.randn(1, 2, 5, 7), torch.zeros(1, 2, 5, 7))
    _, patches = sums_of([part], LatentNorm(2, patch=2))
    found = patches.statistics()
    assert found.count == 2 * 3
    corner = part.mean[:, 0, 0:4:2, 1:6:2]  # channel 0, row 0, column 1 of each patch
    assert found.mean[1].item() == pytest.approx(corner.mean().item(), abs=1e-6)


SIZE = 32  # px of the measured crops; the images are 48 x 40


@pytest.fixture(scope="module")
def few_images(image_folder):
    """8 images."""
    return image_folder / "inner"


def exported(theirs, output, images, **options):
    theirs.save_pretrained(output.parent / "theirs")
    measured = {"data_path": str(images), "image_size": SIZE}
    export(ExportConfig(vae=(str(output.parent / "theirs"),), output=str(output), **measured, **options))


def folded(theirs, tmp_path, images, **options):
    exported(theirs, tmp_path / "folded", images, **options)
    return AutoencoderKL.from_pretrained(tmp_path / "folded")


def center_crops(images):
    """The crops that are measured, each (1, 3, S, S)."""
    for path in sorted(images.rglob("*.png")):
        pixels = np.array(Image.open(path))
        top, left = (pixels.shape[0] - SIZE) // 2, (pixels.shape[1] - SIZE) // 2
        crop = torch.from_numpy(pixels[top : top + SIZE, left : left + SIZE]).permute(2, 0, 1)
        yield crop[None].float() / 127.5 - 1


def scaled_latents(model, images, scaling, shift):
    """Statistics of the latents of the same crops, scaled by a program with fixed constants."""
    sums = LatentSums()
    for crop in center_crops(images):
        posterior = model.encode(crop).latent_dist
        variance = posterior.var * scaling**2
        sums.add((posterior.mean - shift) * scaling, variance.log())
    return sums.statistics()


@pytest.mark.parametrize(
    ("family", "target", "options"),
    [
        ("sdxl", "flux", {}),
        ("flux", "sd", {}),  # without quant convolutions there is no shift
        ("flux", "flux", {"add_quant_conv": True}),
        ("sdxl", "sd", {"per_channel": True}),
    ],
)
def test_folded_latents_match_fixed_constants_and_images_stay(family, target, options, tmp_path, few_images):
    theirs = diffusers_model(family, *SMALL)
    model = folded(theirs, tmp_path, few_images, fold_scaling=target, **options)
    scaling, shift = PUBLISHED_SCALING[target]
    assert (model.config.scaling_factor, model.config.shift_factor) == (scaling, shift)
    found = scaled_latents(model, few_images, scaling, shift)
    assert 1 / found.scaling == pytest.approx(1, abs=1e-5)
    if model.config.use_quant_conv:
        assert found.shift == pytest.approx(0, abs=1e-5)
    if "per_channel" in options:
        assert torch.allclose(found.std, torch.ones_like(found.std), atol=1e-5)
        assert found.mean.abs().max() < 1e-5
    expected = theirs(image()).sample
    assert (model(image()).sample - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_folded_channels_need_no_constants(family, tmp_path, few_images):
    """Mean 0 and standard deviation 1 of each, the same images, also through another program."""
    theirs = diffusers_model(family, *SMALL)
    model = folded(theirs, tmp_path, few_images, fold_scaling="channels")
    assert (model.config.scaling_factor, model.config.shift_factor) == (1.0, 0.0)
    found = scaled_latents(model, few_images, 1.0, 0.0)
    assert found.mean.abs().max() < 1e-5
    assert (found.std - 1).abs().max() < 1e-5
    expected = theirs(image()).sample
    assert (model(image()).sample - expected).abs().max() < 1e-5 * expected.abs().max()
    with safe_open(tmp_path / "folded" / WEIGHTS_NAME, framework="pt") as file:
        assert max(map(abs, json.loads(file.metadata()["latents_mean"]))) < 1e-5


def test_what_cannot_be_folded_is_refused(tmp_path, few_images):
    with pytest.raises(UserError, match=r"--fold_scaling: .* statistics of its latents"):
        folded(diffusers_model("flux2", *SMALL), tmp_path, few_images, fold_scaling="flux")
    with pytest.raises(UserError, match=r"--add_quant_conv: .*already has quant convolutions"):
        folded(diffusers_model("sdxl", *SMALL), tmp_path, few_images, add_quant_conv=True)


def test_measuring_changes_no_weight(tmp_path, few_images):
    theirs = diffusers_model("sdxl", *SMALL)
    model = folded(theirs, tmp_path, few_images)
    assert model.config.scaling_factor == 0.13025  # from the file, because other programs rely on it
    for name, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_unmeasured_latent_norm_is_measured(tmp_path, few_images):
    theirs = diffusers_model("flux2", *SMALL)
    theirs.bn.running_mean.zero_()
    theirs.bn.running_var.fill_(1)
    exported(theirs, tmp_path / "out", few_images)
    ours = load_vae(tmp_path / "out").autoencoder
    assert ours.bn.running_mean.abs().min() > 0
    sums = LatentSums()
    for crop in center_crops(few_images):
        posterior = ours.encode(crop)
        patches = ours.bn.normalize(posterior.mean)
        std = torch.nn.functional.pixel_unshuffle((0.5 * posterior.logvar).exp(), 2)
        std = std / (ours.bn.running_var + ours.bn.eps).sqrt()[:, None, None]
        sums.add(patches, 2 * std.log())
    found = sums.statistics()
    assert found.mean.abs().max() < 1e-5
    assert torch.allclose(found.std, torch.ones_like(found.std), atol=1e-5)
