"""Measuring returns every metric that the tables show, also of bicubic, JPEG and WebP."""

import pytest
import torch

from tests.harness.small_vae import write_vae
from vae.config.trained_vae_flags import EvaluateConfig
from vae.evaluation.compare import Row, on_device
from vae.evaluation.measure import (
    CODECS,
    Metrics,
    VaeCodec,
    bicubic_reconstruction,
    bits_per_pixel,
    latent_bytes,
    through_codec,
)
from vae.evaluation.metrics import bicubic_baseline
from vae.evaluation.results import PER_IMAGE, VaeResult
from vae.images.pixels import psnr, to_float, to_uint8
from vae.interop.vae_files import load_vae

CPU = torch.device("cpu")


def test_every_metric_of_an_image_is_measured():
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    metrics = Metrics(torch.device("cpu"), perceptual=None, rfid=None)
    found = metrics.of_image(image, image)
    assert tuple(found) == PER_IMAGE
    assert found["psnr"] == 128  # of equal images
    assert found["ssim"] is not None
    assert found["ms_ssim"] is None  # the image is too small
    tiny = image[:, :10]
    assert metrics.of_image(tiny, tiny)["ssim"] is None


class Difference:
    """In place of LPIPS."""

    smallest_side = 8

    def __call__(self, recon: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return (recon - images).abs().mean((1, 2, 3))


def test_every_metric_sees_the_reconstruction_in_8_bit():
    generator = torch.Generator().manual_seed(3)
    recon = torch.rand(3, 16, 16, generator=generator) * 2.4 - 1.2  # beyond [-1, 1], too
    image = torch.randint(0, 256, (3, 16, 16), generator=generator).byte()
    metrics = Metrics(CPU, perceptual=Difference(), rfid=None)
    found = metrics.of_image(recon, image)
    assert found == metrics.of_image(to_uint8(recon), image)
    assert found["lpips"] == Difference()(to_float(to_uint8(recon))[None], to_float(image)[None]).item()
    assert found["lpips"] != Difference()(recon[None], to_float(image)[None]).item()


def test_fp16_scales_activations_that_it_cannot_represent(tmp_path):
    images = torch.randint(
        0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    loaded = load_vae(write_vae(tmp_path / "vae"))
    loaded.autoencoder.encoder.conv_in.weight.mul_(1e4)
    row = Row(VaeResult(name="a", path="a", kind="diffusers", config={}), loaded)
    outputs = []
    for dtype in ("fp32", "fp16"):
        config = EvaluateConfig(vae=("a",), data_path=("b",), output_dir="c", dtype=dtype)
        with on_device(config, row, CPU) as codec:
            outputs += codec(images, range(1))
    assert psnr(outputs[1][None], outputs[0][None]).item() > 40  # fp16 alone: infinity


def test_the_first_call_on_a_cpu_is_repeated_before_it_is_timed(tmp_path):
    """Only that one: whole images have many shapes, and each would be computed twice."""
    codec = VaeCodec(load_vae(write_vae(tmp_path / "vae")).autoencoder, torch.float32, None)
    encoded = []
    codec.model.encoder.register_forward_hook(lambda _, inputs, __: encoded.append(inputs[0].shape[-1]))
    for width in (16, 24, 24, 16):
        codec(torch.zeros(1, 3, 16, width, dtype=torch.uint8), range(1))
    assert encoded == [16, 16, 24, 24, 16]


def test_bicubic_reconstruction_of_any_size():
    images = torch.randint(0, 256, (2, 3, 24, 32), dtype=torch.uint8)
    for found, image in zip(bicubic_reconstruction(8)(images, range(2)), images, strict=True):
        assert torch.equal(found, to_uint8(bicubic_baseline(to_float(image[None]), 8))[0])
    (odd,) = bicubic_reconstruction(8)(images[:1, :, :21, :27], range(1))
    assert odd.shape == (3, 21, 27)
    assert odd.dtype == torch.uint8


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


def test_latent_bytes_and_bits_per_pixel():
    assert latent_bytes(512, 768, 16, 8) == 16 * 64 * 96
    assert latent_bytes(257, 255, 4, 8) == 4 * 33 * 32
    assert bits_per_pixel(16, 8) == 2.0
