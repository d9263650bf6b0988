"""Metrics equal independent computations with NumPy, SciPy and pytorch-msssim; sums, baselines, LPIPS."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from vae.config.trained_vae_flags import EvaluateConfig
from vae.evaluation import metrics
from vae.evaluation.early_checks import check_rfid_packages
from vae.evaluation.metrics import (
    baseline_sums,
    bicubic_baseline,
    find_perceptual,
    find_rfid,
    mean_colour,
    means,
    ms_ssim,
    reconstruction_sums,
    ssim,
)
from vae.images.pixels import psnr
from vae.losses.terms import LossTerms, Term
from vae.system.errors import UserError


def image_pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(shape, generator=generator) * 2 - 1
    images = torch.nn.functional.avg_pool2d(images, 3, stride=1, padding=1)
    return images + 0.3 * torch.randn(shape, generator=generator), images  # some values are outside [-1, 1]


def as_8_bit(image: torch.Tensor) -> np.ndarray:
    # fp32 until rounding, so that a tie such as 96.500006 rounds as in a saved image
    return np.rint(np.clip((image.numpy() + 1) * np.float32(127.5), 0, 255)).astype(np.float64)


def ssim_of_scipy(x: np.ndarray, y: np.ndarray) -> float:
    """As scikit-image: windows with reflected borders, then a crop of the outer 5 px."""
    values = []
    for one, other in zip(x, y, strict=True):
        blur = lambda a: ndimage.gaussian_filter(a, 1.5, truncate=3.5)  # noqa: E731
        mx, my = blur(one), blur(other)
        vx, vy, cov = blur(one**2) - mx**2, blur(other**2) - my**2, blur(one * other) - mx * my
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        full = (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
        values.append(full[5:-5, 5:-5].mean())
    return float(np.mean(values))


def test_psnr_equals_numpy():
    recon, images = image_pair(3, 3, 20, 27)
    for index, found in enumerate(psnr(recon, images)):
        mse = np.mean((as_8_bit(recon[index]) - as_8_bit(images[index])) ** 2)
        assert math.isclose(found.item(), 10 * math.log10(255**2 / mse), rel_tol=1e-12)


@pytest.mark.parametrize("size", [(11, 11), (12, 31), (40, 33)])
def test_ssim_equals_scipy(size):
    recon, images = image_pair(2, 3, *size)
    for index, found in enumerate(ssim(recon, images)):
        expected = ssim_of_scipy(as_8_bit(recon[index]), as_8_bit(images[index]))
        assert math.isclose(found.item(), expected, rel_tol=1e-10)


def test_ssim_of_equal_images_is_one_even_if_constant():
    images = torch.cat([torch.full((1, 3, 16, 16), 0.9), image_pair(1, 3, 16, 16)[1]])
    assert torch.allclose(ssim(images, images), torch.ones(2, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_images_of_a_batch_are_independent_in_fp32_and_nan_is_not_hidden(metric):
    recon, images = image_pair(3, 3, 24, 16)
    recon[0, 0, 12, 8] = math.nan
    found = metric(recon, images)
    singles = torch.cat([metric(recon[i : i + 1], images[i : i + 1]) for i in range(3)])
    assert torch.equal(found[1:], singles[1:])
    assert found.isnan().tolist() == [True, False, False]
    half = recon.bfloat16()
    assert torch.equal(metric(half, images)[1:], metric(half.float(), images)[1:])


def level_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Integer 8-bit levels, so that the reference needs no rounding."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 176, 192), generator=generator).double()
    images = torch.nn.functional.avg_pool2d(images, 5, 1, 2).round()
    noise = 20 * torch.randn(images.shape, generator=generator, dtype=torch.float64)
    return (images + noise).round().clamp(0, 255), images


def test_equals_pytorch_msssim():
    recon, images = (levels / 127.5 - 1 for levels in level_pair())
    # pytorch_msssim.ms_ssim(recon, images, data_range=255), one image at a time, in fp64
    expected = torch.tensor([0.8564980014, 0.8599419503], dtype=torch.float64)
    assert torch.allclose(ms_ssim(recon, images), expected, rtol=0, atol=1e-5)  # its window is fp32


def images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_mean_colour_equals_numpy():
    batch = images(2, 3, 6, 10)
    found = mean_colour(batch)
    assert found.shape == batch.shape
    assert torch.allclose(found[1, 2], torch.tensor(batch[1, 2].numpy().mean()), atol=1e-6)
    assert found.std((2, 3)).max() == 0


@pytest.mark.parametrize(("size", "factor"), [((64, 48), 8), ((64, 32), 16), ((8, 8), 8)])
def test_bicubic_equals_pillow(size, factor):
    batch = images(2, 3, *size)
    found = bicubic_baseline(batch, factor)
    height, width = size
    for channel, expected in zip(found.flatten(0, 1), batch.flatten(0, 1).numpy(), strict=True):
        blocks = expected.reshape(height // factor, factor, width // factor, factor).mean((1, 3))
        large = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
        assert np.abs(channel.numpy() - np.clip(np.asarray(large), -1, 1)).max() < 1e-5


def random_images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1


def darker(batch: torch.Tensor) -> torch.Tensor:
    return batch * 0.8


def distance(recon: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (recon - batch).abs().mean((1, 2, 3))


TERMS = LossTerms(image=(Term("a", "", 2.0, distance), Term("b", "", 1.0, lambda x, y: distance(x, y) ** 2)))


def test_mean_is_over_images_not_batches():
    whole = random_images(5)
    found = means(reconstruction_sums(darker, whole.split([1, 4]), TERMS))
    assert set(found) == {"loss", "loss_a", "loss_b", "psnr", "ssim", "images"}
    assert found["images"] == 5
    assert math.isclose(found["psnr"], psnr(darker(whole), whole).mean().item(), rel_tol=1e-12)
    assert math.isclose(found["ssim"], ssim(darker(whole), whole).mean().item(), rel_tol=1e-12)
    assert math.isclose(found["loss_a"], distance(darker(whole), whole).mean().item(), rel_tol=1e-6)
    assert math.isclose(found["loss"], 2 * found["loss_a"] + found["loss_b"], rel_tol=1e-6)


def test_the_loss_is_that_of_an_image_as_it_is_saved():
    images = torch.ones(1, 3, 16, 24)
    assert means(reconstruction_sums(lambda batch: batch * 3, [images], TERMS))["loss"] == 0


def test_sums_of_ranks_add_up_even_if_one_has_no_images():
    whole = random_images(5)
    parts = [reconstruction_sums(darker, [part], TERMS) for part in whole.split([2, 3])] + [
        reconstruction_sums(darker, [], TERMS)
    ]
    added = {name: tuple(map(sum, zip(*(part[name] for part in parts), strict=True))) for name in parts[0]}
    together, alone = means(added), means(reconstruction_sums(darker, [whole], TERMS))
    assert together.keys() == alone.keys()
    assert all(math.isclose(together[name], alone[name], rel_tol=1e-6) for name in alone)
    assert all(type(total) is float and type(count) is int for total, count in parts[0].values())


def test_crops_of_one_colour_do_not_decide_the_mean_of_the_baseline():
    """Bicubic copies them exactly; a VAE that is better on every other crop is better in the mean."""
    noisy, plain = random_images(3), torch.full_like(random_images(1), 0.25)
    batch = torch.cat([noisy, plain])
    bicubic = means(baseline_sums([batch], TERMS)["bicubic"])["psnr"]
    alone = means(baseline_sums([noisy], TERMS)["bicubic"])["psnr"]
    assert bicubic == pytest.approx((3 * alone + 20 * math.log10(255)) / 4)
    vae = means(reconstruction_sums(lambda x: x * 0.9 + 0.01, [batch], TERMS))["psnr"]
    assert vae > bicubic


def test_baselines_are_measured_like_reconstructions():
    batches = random_images(3).split(2)
    assert baseline_sums(iter(batches), TERMS, factor=8) == {
        "mean_colour": reconstruction_sums(mean_colour, batches, TERMS),
        "bicubic": reconstruction_sums(lambda batch: bicubic_baseline(batch, 8), batches, TERMS),
    }


CPU = torch.device("cpu")


def config(**given) -> EvaluateConfig:
    return EvaluateConfig(vae=("x",), data_path="y", output_dir="z", **given)


@pytest.fixture
def no_weights(tmp_path, monkeypatch):
    """An empty cache, and URLs without a server."""
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("vae.losses.trunk_weights.URLS", {"vgg": "http://127.0.0.1:9/vgg16-397923af.pth"})
    monkeypatch.setattr(metrics, "INCEPTION_URL", "http://127.0.0.1:9/weights-6726825d.pth")
    return tmp_path


def test_unavailable_lpips_is_reported_as_missing(no_weights):
    missing: dict[str, str] = {}
    assert find_perceptual(config(), CPU, missing) == (None, None)
    assert "vgg16-397923af.pth" in missing["lpips"]
    assert "--perceptual_net none" in missing["lpips"]
    assert "train" not in missing["lpips"].replace("trained", "")


def test_unavailable_lpips_is_an_error_if_requested(no_weights):
    with pytest.raises(UserError, match=r"--perceptual_net vgg: .*--perceptual_weights FILE"):
        find_perceptual(config(perceptual_net="vgg"), CPU, {})
    with pytest.raises(UserError, match=r"--perceptual_weights gone\.pth is not a file"):
        find_perceptual(config(perceptual_weights="gone.pth"), CPU, {})


def test_rfid_is_reported_as_missing_or_names_its_packages(monkeypatch):
    missing: dict[str, str] = {}
    assert find_rfid(config(), CPU, missing) is None
    assert "--rfid" in missing["rfid"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install torchmetrics torch-fidelity"):
        check_rfid_packages()


def test_inception_weights_are_found_and_read(no_weights):
    with pytest.raises(UserError, match=r"--rfid: .* --inception_weights FILE"):
        find_rfid(config(rfid=True), CPU, {})
    with pytest.raises(UserError, match=r"--inception_weights gone\.pth is not a file"):
        find_rfid(config(rfid=True, inception_weights="gone.pth"), CPU, {})
    pytest.importorskip("torchmetrics", reason="requirements-test.txt has it")
    path = no_weights / "torn.pth"
    path.write_bytes(b"torn")
    with pytest.raises(
        UserError, match=r"--inception_weights .*torn\.pth is damaged, or is not .*/releases/"
    ):
        find_rfid(config(rfid=True, inception_weights=str(path)), CPU, {})
