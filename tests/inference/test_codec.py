"""Whole images and blended tiles of any size: exact where they can be, and within the memory there is."""

import itertools
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness.small_vae import SMALL
from vae.config.model_options import ModelConfig
from vae.config.resolve import tiny_shape
from vae.inference import codec, infer
from vae.inference.codec import (
    SampledNorm,
    blend,
    count_tiles,
    crop_back,
    decode_latents,
    encode_images,
    pad_to_multiple,
    with_sampled_norms,
)
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


@pytest.mark.parametrize(
    "config", [NARROW, replace(QUANT, padding="reflect"), replace(NARROW, decoder_scale=2), WAN, TINY]
)
def test_a_tile_with_the_statistics_of_the_image_is_the_network(config, monkeypatch):
    monkeypatch.setattr(codec, "SAMPLE_BORDER", 10**9)  # the whole sample is measured
    model = network(config)
    sampled = with_sampled_norms(model)
    images = image(64, 88)[:1]
    latents = torch.randn(1, 4, 20, 13, dtype=torch.float64)
    for tile, whole, values in (
        (sampled.encoder, model.encoder, images),
        (sampled.decoder, model.decoder, latents),
    ):
        with torch.no_grad():
            tile(values)
            for norm in tile.modules():
                if isinstance(norm, SampledNorm):
                    norm.is_measuring = False
            torch.testing.assert_close(tile(values), whole(values), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(16, 16), (17, 90), (61, 33), (200, 15)])
def test_a_function_of_single_pixels_is_exact(size):
    values = torch.randn(2, 3, *size, dtype=torch.float64)
    tiles = []

    def enlarge(tile: torch.Tensor) -> torch.Tensor:
        tiles.append(tile)
        return (2 * tile).repeat_interleave(4, 2).repeat_interleave(4, 3)

    result = blend(enlarge, values, units=(1, 4), side=16)
    torch.testing.assert_close(result, enlarge(values), rtol=0, atol=1e-12)
    assert len(tiles) == count_tiles(values.shape, 1, 16) + 1


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
    result = blend(black_or_white, values, units=(1, 8), side=16)
    assert {0.0, 1.0} <= set(result.unique().tolist())
    assert result.diff(dim=3).abs().max() <= 1 / 17 + 1e-6


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake tensors of a card need a CUDA build")
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


def test_padding_repeats_the_last_pixels_and_is_cropped_off_again():
    images = torch.arange(2 * 3 * 9 * 11).reshape(2, 3, 9, 11).to(torch.uint8)
    padded = pad_to_multiple(images, 4)
    assert padded.shape == (2, 3, 12, 12)
    assert torch.equal(padded[:, :, 11, :11], images[:, :, 8])
    assert torch.equal(padded[:, :, :9, 11], images[:, :, :, 10])
    assert torch.equal(crop_back(padded, (9, 11)), images)


MB = 10**6


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A large and a small image. 20 MB are free: SMALL decodes the large one in 42 MB."""
    monkeypatch.setattr(codec, "free_memory", lambda: 20 * MB)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (400, 300)).save(tmp_path / "photos" / "large.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "photos" / "small.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("mode", "words", "remedy"),
    [
        ("reconstruct", ("--tiles", "off"), "use --tiles blended"),
        ("encode", ("--tiles", "off"), "use --tiles blended"),
        ("reconstruct", ("--tiles", "blended"), "shrink"),
    ],
)
def test_infer_refuses_the_image_and_finishes_the_others(
    command, photos, tmp_path, capsys, mode, words, remedy
):
    assert command(mode, "--input", photos, *words) == 77
    reported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("large.png")]
    assert len(reported) == 1
    for token in ("out_of_memory", "needs at least 0.0 GiB", remedy):
        assert token in reported[0]
    assert [path.stem for path in (tmp_path / "out").glob("[!.]*")] == ["small"]


@pytest.mark.parametrize("free_mb", [20, 50])
def test_only_an_image_that_may_not_fit_is_computed_in_tiles(
    command, photos, tmp_path, capsys, monkeypatch, free_mb
):
    """Tiles of 128 px need 6 MB. What is counted is less than the peak: of 50 MB, 42 MB may be too much."""
    monkeypatch.setattr(codec, "free_memory", lambda: free_mb * MB)
    assert command("reconstruct", "--input", photos, "--tile_size", 128) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "approximate" in line]
    assert len(warnings) == 1
    assert "large.png does not fit into memory on cpu" in warnings[0]
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"large", "small"}


def test_an_image_that_would_take_minutes_is_computed_in_tiles(
    command, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(codec, "free_memory", lambda: 500 * MB)
    monkeypatch.setattr(codec, "TIMED_TOKENS", 64)  # the small image has fewer
    monkeypatch.setattr(infer, "MAX_ATTENTION_SECONDS", 0.0)
    assert command("reconstruct", "--input", photos, "--tile_size", 128) == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "approximate" in line]
    assert "large.png takes about 0 minutes" in warning
    assert command("reconstruct", "--input", photos, "--tiles", "off", "--overwrite") == 0
    printed = capsys.readouterr().out
    assert "approximate" not in printed
    assert "0.1 megapixels takes about 0 minutes" in printed


@pytest.mark.parametrize(
    ("shape", "images", "dtype"),
    [
        (SMALL, 1, torch.float32),  # attention decides in the encoder
        (SMALL, 2, torch.bfloat16),  # in both
        (replace(QUANT, channels=(16, 128)), 1, torch.float32),
        (ModelConfig(channels=(32, 64, 128, 128)), 1, torch.float32),  # nowhere
        (TINY, 2, torch.float32),
        (ModelConfig(**tiny_shape(32, 6, "taesana")), 2, torch.float32),
    ],
)
def test_memory_of_a_cpu_is_neither_refused_nor_exceeded(shape, images, dtype, monkeypatch):
    """What the check demands is at most what the network needs, and at least LEAST_SHARE of it."""
    model = AutoencoderKL(shape)
    values = torch.zeros(images, 3, 128, 128, dtype=dtype).to(memory_format=torch.channels_last)
    with torch.no_grad(), LiveBytes() as encoding:
        latents = model.encode(values).mode().to(dtype)
    with torch.no_grad(), LiveBytes() as decoding:
        model.decode(latents)
    for operation, counted in (("encode", encoding), ("decode", decoding)):
        monkeypatch.setattr(codec, "free_memory", lambda counted=counted: counted.peak)
        pixels = images * 128**2
        codec.check_main_memory(model, operation, pixels, dtype, None, images=images)
        with pytest.raises(MemoryError, match=f"{operation} needs at least"):
            codec.check_main_memory(model, operation, pixels, dtype, None, codec.LEAST_SHARE, images)
