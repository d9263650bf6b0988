"""Images that do not fit into main memory are refused: Linux would end the process without a message."""

import pytest
import torch
from PIL import Image

import vae
from tests.harness.small_vae import SMALL
from vae.config.options import ModelConfig
from vae.inference import codec
from vae.memory.live_bytes import LiveBytes
from vae.model.autoencoder import AutoencoderKL

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


def test_reconstruction_is_refused_before_it_is_encoded(command, photos, monkeypatch):
    """Encoding fits, decoding does not."""
    monkeypatch.setattr(codec, "free_memory", lambda: 35 * MB)
    monkeypatch.setattr(AutoencoderKL, "encode", lambda *_: pytest.fail("encoded"))
    assert command("reconstruct", "--tiles", "off", "--input", photos / "large.png") == 77


def test_python_api_raises_a_memory_error(vae_folder, photos):
    with pytest.raises(MemoryError, match="GiB"):
        vae.encode(vae.load_vae(vae_folder, device="cpu"), photos / "large.png")


@pytest.mark.parametrize(("shape", "least"), [(SMALL, 0.4), (ModelConfig(), 0.7)])
def test_no_image_that_fits_is_refused(shape, least):
    """What the check demands is at most what the network needs; the attention of SMALL needs more."""
    with torch.device("meta"):
        model = AutoencoderKL(shape)
    images = torch.empty(1, 3, 512, 512, device="meta").to(memory_format=torch.channels_last)
    with torch.no_grad(), LiveBytes() as encoding:
        latents = model.encode(images).mode()
    with torch.no_grad(), LiveBytes() as decoding:
        model.decode(latents)
    for name, counted in (("encode", encoding), ("decode", decoding)):
        demanded = codec._MAPS[name] * 512**2 * shape.channels[0] * 4
        assert least * counted.peak < demanded <= counted.peak
