"""Tiles give the result of the whole image with a fraction of the device memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vae.config.options import ModelConfig
from vae.inference.codec import decode_latents, encode_images
from vae.inference.feature_map import Moments
from vae.memory.live_bytes import LiveBytes
from vae.model.autoencoder import AutoencoderKL

NARROW = ModelConfig(channels=(8, 16, 16), layers_per_block=1, norm_groups=4, z_channels=4)
QUANT = ModelConfig(channels=(8, 16), layers_per_block=2, norm_groups=8, z_channels=4, use_quant_conv=True)
WAN = ModelConfig(
    family="wan",
    channels=(6, 12, 12),
    z_channels=4,
    layers_per_block=1,
    use_quant_conv=True,
    latent_norm=True,
)


def network(config: ModelConfig, dtype: torch.dtype = torch.float64) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(config).to(dtype)


def image(height: int, width: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    coarse = torch.rand(2, 3, 5, 7, dtype=torch.float64)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (2 * smooth - 1 + 0.1 * torch.randn(smooth.shape, dtype=torch.float64)).to(dtype)


def reconstruct(model: AutoencoderKL, images: torch.Tensor, dtype=torch.float32, tile=None) -> torch.Tensor:
    latents = encode_images(model, images, dtype=dtype, tile=tile).mode()
    return decode_latents(model, latents, images.shape[2:], dtype=dtype, tile=tile)


# fp64 rounds at 1e-16, so a missing border pixel or a norm over only a part of the image would be visible.
@pytest.mark.parametrize("config", [NARROW, QUANT, WAN], ids=["three levels", "quant convs", "wan"])
@pytest.mark.parametrize("tile", [7, 16, 24, 1000])
def test_tiles_equal_the_whole_image(config, tile):
    model, images = network(config), image(61, 90)
    whole = encode_images(model, images, dtype=torch.float64)
    tiled = encode_images(model, images, dtype=torch.float64, tile=tile)
    torch.testing.assert_close(tiled.mean, whole.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(tiled.logvar, whole.logvar, rtol=0, atol=1e-12)
    recon = decode_latents(model, whole.mean, (61, 90), dtype=torch.float64)
    in_tiles = decode_latents(model, whole.mean, (61, 90), dtype=torch.float64, tile=tile)
    assert in_tiles.shape == images.shape
    torch.testing.assert_close(in_tiles, recon, rtol=0, atol=1e-12)


def test_fp32_tiles_differ_only_by_rounding():
    model, images = network(NARROW, torch.float32), image(61, 90, torch.float32)
    whole, tiled = reconstruct(model, images), reconstruct(model, images, tile=16)
    assert (tiled - whole).abs().max() < 1e-3 * 2  # a thousandth of the range [-1, 1]


def test_bf16_tiles_are_as_accurate_as_the_whole_image():
    model, images = network(NARROW), image(61, 90)
    truth = reconstruct(model, images, dtype=torch.float64)
    whole, tiled = (reconstruct(model, images, dtype=torch.bfloat16, tile=tile) for tile in (None, 16))
    error = (whole.double() - truth).square().mean().sqrt()
    assert (
        tiled.double() - truth
    ).square().mean().sqrt() < 1.2 * error  # both errors are rounding, so they are about equal


def test_statistics_of_parts_equal_those_of_the_whole():
    h = torch.randn(2, 8, 30, 40, dtype=torch.float64) * 3 + 1000  # E[x²] - E[x]² loses five digits
    moments = Moments(4)
    for top, bottom in ((0, 1), (1, 17), (17, 30)):
        moments.add(h[:, :, top:bottom])
    mean, rstd = moments.statistics(0.0, h)
    variance, expected = torch.var_mean(h.reshape(2, 4, -1), dim=-1, correction=0)
    torch.testing.assert_close(mean, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(rstd, variance.rsqrt(), rtol=1e-11, atol=0)


def test_progress_counts_the_flops_of_an_image():
    model = network(QUANT, torch.float32)
    images, latents = torch.zeros(1, 3, 64, 96), torch.zeros(1, 4, 32, 48)
    encoding: list[tuple[int, int]] = []
    decoding: list[tuple[int, int]] = []
    encode_images(model, images, tile=24, on_step=lambda *step: encoding.append(step))
    decode_latents(model, latents, tile=24, on_step=lambda *step: decoding.append(step))
    model.to("meta")
    with LiveBytes() as of_encoder:
        model.encode(images.to("meta"))
    with LiveBytes() as of_decoder:
        model.decode(latents.to("meta"))
    for steps, counted in ((encoding, of_encoder.flops), (decoding, of_decoder.flops)):
        done, totals = zip(*steps, strict=True)
        assert len(set(totals)) == 1
        assert totals[0] == pytest.approx(counted, rel=0.01)  # without padding
        assert list(done) == sorted(done)
        assert done[-1] == totals[0]


def peaks(side: int, tile: int | None, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Peak bytes on "cuda" and "cpu" to encode and to decode with the default network, without computing."""
    found = {}
    with FakeTensorMode():
        with torch.device("cuda"):
            model = AutoencoderKL(ModelConfig())
        latent = side // model.downsampling
        images, latents = (
            torch.empty(1, 3, side, side),
            torch.empty(1, model.config.z_channels, latent, latent),
        )
        for name, function, value in (("encode", encode_images, images), ("decode", decode_latents, latents)):
            with LiveBytes("cuda") as device, LiveBytes("cpu") as host:
                function(model, value, dtype=dtype, tile=tile)
            found[name] = {"cuda": device.peak, "cpu": host.peak}
    return found


@pytest.mark.slow
def test_tiles_need_a_quarter_of_the_device_memory_and_features_are_on_the_host():
    for side, tile, dtype in (
        (1024, 256, torch.bfloat16),
        (3072, 512, torch.float32),
    ):
        whole, tiled = (peaks(side, size, dtype) for size in (None, tile))
        for name in ("encode", "decode"):
            assert tiled[name]["cuda"] <= whole[name]["cuda"] / 4
            # the host stores 128 + 256 channels of the decoder's finest level at once, and a band of rows
            assert 128 <= tiled[name]["cpu"] / (side * side * dtype.itemsize) <= 440
