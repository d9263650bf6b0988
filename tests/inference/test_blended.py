"""Blended tiles: exact for what looks at few pixels, without seams, and bounded in memory."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness.small_vae import SMALL
from vae.config.options import ModelConfig
from vae.inference import codec
from vae.inference.codec import Moments, blend, count_tiles, decode_latents, encode_images, starts
from vae.memory.live_bytes import LiveBytes
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize

NARROW = ModelConfig(channels=(8, 16, 16), layers_per_block=1, norm_groups=4, z_channels=4)
QUANT = ModelConfig(channels=(8, 16), layers_per_block=2, norm_groups=8, z_channels=4, use_quant_conv=True)
TINY = ModelConfig(channels=(8, 8), norm_groups=4, z_channels=4, decoder="tiny")
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


@pytest.mark.parametrize("config", [NARROW, replace(QUANT, padding="reflect"), WAN, TINY])
def test_a_tile_with_the_statistics_of_the_image_is_the_network(config, monkeypatch):
    monkeypatch.setattr(codec, "SAMPLE_BORDER", 10**9)  # the whole sample is measured
    model = network(config)
    operations = {"encode": (model.encode, image(64, 88)[:1])}
    operations["decode"] = (model.decode, torch.randn(1, 4, 20, 13, dtype=torch.float64))
    for name, (function, values) in operations.items():
        steps = codec.steps_of(model, name)
        moments = codec._no_moments(steps)
        codec.run_with_moments(steps, values, moments, measure=True)
        with torch.no_grad():
            found, whole = codec.run_with_moments(steps, values, moments), function(values)
        expected = whole if name == "decode" else torch.cat([whole.mean, whole.logvar], 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_statistics_of_parts_equal_those_of_the_whole():
    h = torch.randn(2, 8, 30, 40, dtype=torch.float64) * 3 + 1000  # E[x²] - E[x]² loses five digits
    moments = Moments(4)
    for top, bottom in ((0, 1), (1, 17), (17, 30)):
        moments.add(h[:, :, top:bottom])
    mean, rstd = moments.statistics(0.0, h)
    variance, expected = torch.var_mean(h.reshape(2, 4, -1), dim=-1, correction=0)
    torch.testing.assert_close(mean, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(rstd, variance.rsqrt(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("size", [(16, 16), (17, 90), (61, 33), (200, 15)])
def test_a_function_of_single_pixels_is_exact(size):
    values = torch.randn(2, 3, *size, dtype=torch.float64)
    steps = []
    result = blend(
        lambda tile: (2 * tile).repeat_interleave(4, 2).repeat_interleave(4, 3),
        values,
        units=(1, 4),
        side=16,
        count=lambda: steps.append(1),
    )
    expected = (2 * values).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert len(steps) == count_tiles(values.shape, 1, 16)


def test_tiles_cover_every_unit_and_overlap():
    for length in range(1, 200):
        found = starts(length, 16)
        assert found[0] == 0
        assert found[-1] + 16 >= length
        assert found == sorted(set(found))
        assert all(before + 16 - after >= 4 for before, after in itertools.pairwise(found))


def test_network_with_norms_per_pixel_and_no_attention_is_exact():
    """Its layers see less than the 16 latent pixels that are left out at the borders of tiles of 256 px."""
    model = network(replace(WAN, mid_attention=False))
    images = image(272, 300)
    whole = encode_images(model, images, dtype=torch.float64)
    tiled = encode_images(model, images, dtype=torch.float64, tile=256)
    torch.testing.assert_close(tiled.mean, whole.mean, rtol=0, atol=1e-12)
    recon = decode_latents(model, whole.mean, (270, 297), dtype=torch.float64)
    in_tiles = decode_latents(model, whole.mean, (270, 297), dtype=torch.float64, tile=256)
    torch.testing.assert_close(in_tiles, recon, rtol=0, atol=1e-12)


def test_norms_have_the_statistics_of_the_whole_image():
    """An image that is flat on one side: with the statistics of each tile, errors are 7 times as large."""
    model = AutoencoderKL(replace(SMALL, mid_attention=False))
    initialize(model, "default", 0)
    images = image(384, 384, torch.float32)[:1]
    images[..., :192] = 0.1 * images[..., :192] + 0.5
    whole = encode_images(model, images).mean
    blended = encode_images(model, images, tile=128).mean
    alone = torch.cat([encode_images(model, part).mean for part in images.split(128, dim=3)], dim=3)
    assert (blended - whole).square().mean() < (alone - whole).square().mean() / 4


def test_seams_fade_over_half_of_the_overlap():
    """Of black and white tiles, the step from one pixel to the next is a 17th of the difference."""
    numbers = itertools.count()

    def black_or_white(tile: torch.Tensor) -> torch.Tensor:
        sides = [8 * side for side in tile.shape[2:]]
        return torch.full((1, 1, *sides), float(next(numbers) % 2), dtype=torch.float64)

    values = torch.empty(1, 1, 16, 60)
    result = blend(black_or_white, values, units=(1, 8), side=16, count=lambda: None)
    assert {0.0, 1.0} <= set(result.unique().tolist())
    assert result.diff(dim=3).abs().max() <= 1 / 17 + 1e-6


def test_memory_is_that_of_a_tile():
    """More pixels need as much device memory, and on the host only the result and a strip of it."""
    shape = ModelConfig(channels=(8, 8), layers_per_block=1, norm_groups=4, z_channels=4, mid_attention=False)
    peaks = []
    for side in (96, 128):
        with FakeTensorMode():
            with torch.device("cuda"):
                model = AutoencoderKL(shape)
            latents = torch.empty(1, 4, side // 2, side // 2)
            with LiveBytes("cuda") as device, LiveBytes("cpu") as host:
                decode_latents(model, latents, tile=64)
        peaks.append(device.peak)
        assert host.peak <= 3.5 * 3 * side**2 * 4
    assert peaks[1] == peaks[0]
