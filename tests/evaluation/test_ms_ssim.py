"""MS-SSIM equals recorded values of pytorch-msssim 1.0.0."""

import torch

from vae.evaluation.metrics import ms_ssim


def image_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Integer 8-bit levels, so that the reference needs no rounding."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 176, 192), generator=generator).double()
    images = torch.nn.functional.avg_pool2d(images, 5, 1, 2).round()
    noise = 20 * torch.randn(images.shape, generator=generator, dtype=torch.float64)
    return (images + noise).round().clamp(0, 255), images


def test_equals_pytorch_msssim():
    recon, images = (levels / 127.5 - 1 for levels in image_pair())
    # pytorch_msssim.ms_ssim(recon, images, data_range=255), one image at a time, in fp64
    expected = torch.tensor([0.8564980014, 0.8599419503], dtype=torch.float64)
    assert torch.allclose(ms_ssim(recon, images), expected, rtol=0, atol=1e-5)  # its window is fp32


def test_equal_images_give_one_and_worse_ones_give_less():
    recon, images = (levels / 127.5 - 1 for levels in image_pair())
    assert torch.allclose(ms_ssim(images, images), torch.ones(2, dtype=torch.float64), rtol=1e-12)
    assert (ms_ssim(2 * recon - images, images) < ms_ssim(recon, images)).all()
    assert (ms_ssim(-images, images) == 0).all()  # negative factors give 0, not NaN
