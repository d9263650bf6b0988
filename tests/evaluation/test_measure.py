"""Measuring returns every metric that the tables show."""

import torch

from vae.evaluation.measure import Metrics
from vae.evaluation.results import PER_IMAGE


def test_every_metric_of_an_image_is_measured():
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    found = Metrics(torch.device("cpu"), perceptual=None, rfid=None).of_image(image, image)
    assert tuple(found) == PER_IMAGE
    assert found["psnr"] is not None
    assert found["ms_ssim"] is None  # the image is too small
