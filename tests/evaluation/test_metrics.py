"""PSNR, SSIM and MS-SSIM equal independent computations with NumPy, SciPy and pytorch-msssim."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from vae.evaluation.metrics import ms_ssim, ssim
from vae.images.psnr import psnr


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


def test_psnr_of_one_level_and_of_equal_images():
    images = torch.full((1, 3, 4, 4), 100 / 127.5 - 1)
    recon = images + 1 / 127.5  # one 8-bit level
    assert math.isclose(psnr(recon, images).item(), 20 * math.log10(255), rel_tol=1e-12)
    assert psnr(images + 0.1 / 255, images).item() == math.inf  # rounds to the same image


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
def test_images_of_a_batch_are_independent(metric):
    recon, images = image_pair(3, 3, 24, 16)
    singles = torch.cat([metric(recon[i : i + 1], images[i : i + 1]) for i in range(3)])
    assert torch.equal(metric(recon, images), singles)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_bf16_is_measured_in_fp32(metric):
    recon, images = image_pair(1, 3, 24, 16)
    recon = recon.bfloat16()
    assert torch.equal(metric(recon, images), metric(recon.float(), images))


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_nan_is_not_hidden(metric):
    recon, images = image_pair(2, 3, 24, 16)
    recon[0, 0, 12, 8] = math.nan
    found = metric(recon, images)
    assert found.isnan().tolist() == [True, False]


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


def test_equal_images_give_one_and_worse_ones_give_less():
    recon, images = (levels / 127.5 - 1 for levels in level_pair())
    assert torch.allclose(ms_ssim(images, images), torch.ones(2, dtype=torch.float64), rtol=1e-12)
    assert (ms_ssim(2 * recon - images, images) < ms_ssim(recon, images)).all()
    assert (ms_ssim(-images, images) == 0).all()  # negative factors give 0, not NaN
