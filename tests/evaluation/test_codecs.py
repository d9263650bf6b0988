"""Classic codecs use the best quality that fits into their number of bytes."""

import io

import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from vae.evaluation.codecs import CODECS, bits_per_pixel, latent_bytes, through_codec
from vae.images.psnr import psnr


def image() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand((1, 3, 9, 9), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=96, mode="bicubic").clamp(0, 1)
    return (smooth[0] * 255).round().to(torch.uint8)


def error_db(recon: torch.Tensor) -> float:
    return psnr(*(levels[None].float() / 127.5 - 1 for levels in (recon, image()))).item()


@pytest.mark.parametrize("codec", CODECS)
def test_quality_grows_with_bytes_and_too_few_bytes_give_none(codec):
    values = [error_db(through_codec(image(), codec, budget)) for budget in (900, 1500, 4000)]
    assert values == sorted(values)
    assert values[0] < values[2]
    assert through_codec(image(), codec, 20) is None


@pytest.mark.parametrize("codec", CODECS)
def test_best_quality_within_the_bytes_is_used(codec):
    budget, fitting = 1500, []
    for quality in range(1, 96):
        buffer = io.BytesIO()
        to_pil_image(image()).save(buffer, format=codec, quality=quality, **CODECS[codec])
        if len(buffer.getvalue()) <= budget:
            fitting.append(quality)
    buffer = io.BytesIO()
    to_pil_image(image()).save(buffer, format=codec, quality=max(fitting), **CODECS[codec])
    assert error_db(through_codec(image(), codec, budget)) == error_db(
        through_codec(image(), codec, len(buffer.getvalue()))
    )


def test_latent_bytes_and_bits_per_pixel():
    assert latent_bytes(512, 768, 16, 8) == 16 * 64 * 96
    assert latent_bytes(257, 255, 4, 8) == 4 * 33 * 32
    assert bits_per_pixel(16, 8) == 2.0
