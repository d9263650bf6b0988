"""The terms of images: their formulas, and precision."""

import pytest
import torch
from torch.nn import functional as F

from vae.losses.reconstruction import reconstruction_loss
from vae.losses.ssim import WINDOW, structural_dissimilarity


def pair(height: int, width: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise images and a reconstruction, fp64."""
    generator = torch.Generator().manual_seed(height)
    images = torch.rand(batch, 3, height, width, generator=generator, dtype=torch.float64) * 2 - 1
    return images + 0.2 * torch.randn(images.shape, generator=generator, dtype=torch.float64), images


def plain_ssim(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Wang et al. 2004, equation 13, with the variances of the values of each window; values 0 to 255."""
    x, y = ((t + 1) * 127.5 for t in (x, y))
    a, b = (t.unfold(2, WINDOW, 1).unfold(3, WINDOW, 1).flatten(4) for t in (x, y))  # (B, 3, h, w, 49)
    mean_a, mean_b = a.mean(-1), b.mean(-1)
    covariance = ((a - mean_a[..., None]) * (b - mean_b[..., None])).mean(-1)
    variances = a.var(-1, correction=0) + b.var(-1, correction=0)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    value = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (value / ((mean_a**2 + mean_b**2 + c1) * (variances + c2))).mean((1, 2, 3))


@pytest.mark.parametrize(
    ("size", "scales"),
    [((7, 9), 1), ((16, 13), 1), ((16, 16), 2), ((27, 40), 2), ((28, 28), 3), ((96, 65), 3)],
)
def test_value_is_the_mean_of_the_scales_that_hold_a_window(size, scales):
    recon, images = pair(*size)
    expected = [plain_ssim(F.avg_pool2d(recon, 2**s), F.avg_pool2d(images, 2**s)) for s in range(scales)]
    found = structural_dissimilarity(recon, images)
    torch.testing.assert_close(found, 1 - torch.stack(expected).mean(0), rtol=1e-9, atol=1e-12)
    single = structural_dissimilarity(recon.float(), images.float())
    torch.testing.assert_close(single.double(), found, rtol=1e-5, atol=1e-6)  # variances are differences


def test_blur_costs_more_than_an_offset_with_the_same_l1():
    _, images = pair(64, 64)
    images = images * 0.5  # room for the offset
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="reflect"), 3, stride=1)
    offset = images + (blurred - images).abs().mean()
    assert (structural_dissimilarity(blurred, images) > 2 * structural_dissimilarity(offset, images)).all()


def test_values_by_hand():
    images = torch.zeros(2, 3, 4, 5)
    recon = images.clone()
    recon[0] += 0.5
    recon[1, 0] -= 0.25  # one channel of three
    assert torch.allclose(reconstruction_loss(recon, images, "l1"), torch.tensor([0.5, 0.25 / 3]))
    assert torch.allclose(reconstruction_loss(recon, images, "mse"), torch.tensor([0.25, 0.0625 / 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_fp32(dtype):
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    recon = (images * 0.9).to(dtype)
    exact = (recon.double() - images.double()).abs().mean()
    loss = reconstruction_loss(recon, images, "l1")
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 1e-7  # fp32 rounding of values near 0.05
