"""Measuring returns every metric that the tables show; the bicubic baseline has any size."""

import torch

from vae.evaluation.baselines import bicubic_baseline
from vae.evaluation.measure import Metrics, bicubic_reconstruction
from vae.evaluation.protocols import RULES
from vae.evaluation.results import PER_IMAGE
from vae.images.pixels import to_float, to_uint8


def test_every_metric_of_an_image_is_measured():
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    metrics = Metrics(torch.device("cpu"), perceptual=None, rfid=None, rules=RULES["resize"])
    found = metrics.of_image(image, image)
    assert tuple(found) == PER_IMAGE
    assert found["psnr"] is not None
    assert found["ssim"] is not None
    assert found["ms_ssim"] is None  # the image is too small
    tiny = image[:, :10]
    assert metrics.of_image(tiny, tiny)["ssim"] is None


def test_bicubic_reconstruction_of_any_size():
    images = torch.randint(0, 256, (2, 3, 24, 32), dtype=torch.uint8)
    for found, image in zip(bicubic_reconstruction(8)(images, range(2)), images, strict=True):
        assert torch.equal(found, to_uint8(bicubic_baseline(to_float(image[None]), 8))[0])
    (odd,) = bicubic_reconstruction(8)(images[:1, :, :21, :27], range(1))
    assert odd.shape == (3, 21, 27)
    assert odd.dtype == torch.uint8
