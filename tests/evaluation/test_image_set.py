"""The images that are measured, and how they are cropped: the same for every VAE."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.http_store import http_store, hurry
from tests.harness.shards import pack, write_shards
from vae.config.trained_vae_flags import WHOLE, EvaluateConfig
from vae.evaluation.image_set import find_images, square
from vae.shards.dataset_json import read_dataset
from vae.system.errors import DataError


@pytest.fixture
def folder(image_folder, tmp_path):
    """Three images of 48 x 40 px, a small one, a truncated one, and a text file."""
    for index in (0, 2, 4):
        name = f"image_{index:02d}.png"
        (tmp_path / name).write_bytes((image_folder / name).read_bytes())
    Image.new("RGB", (30, 7)).save(tmp_path / "tiny.png")
    (tmp_path / "torn.png").write_bytes((image_folder / "image_00.png").read_bytes()[:300])
    (tmp_path / "text.jpg").write_text("not an image")
    return tmp_path


def config(folder, **given) -> EvaluateConfig:
    return EvaluateConfig(vae=("x",), data_path=str(folder), output_dir="y", **given)


def test_unusable_files_are_reported_and_others_are_measured(folder):
    found, unusable = find_images(config(folder, sizes=(32,)))
    assert found.names == ["image_00.png", "image_02.png", "image_04.png"]
    assert sorted(unusable) == ["text.jpg", "tiny.png", "torn.png"]
    assert "30x7" in unusable["tiny.png"]
    batches = list(found.batches(32, 2))
    assert [len(names) for names, _ in batches] == [2, 1]
    assert batches[0][1].shape == (2, 3, 32, 32)
    assert torch.equal(batches[1][1][0], found.read("image_04.png", 32))


def test_images_must_be_large_enough_for_every_size(folder):
    with pytest.raises(DataError, match=r"--data_path .*none of its 6 images.*image_00.*64 px.*--sizes"):
        find_images(config(folder, sizes=(32, 64)))
    _, unusable = find_images(config(folder, sizes=(WHOLE,)))
    assert "8 px" in unusable["tiny.png"]


def test_dataset_of_shards_is_measured_like_its_files(folder, tmp_path_factory):
    """The same crops as from the folder; a damaged image is named and left out."""
    path = pack(folder, tmp_path_factory.mktemp("sharded") / "set", min_size=1)
    found, unusable = find_images(config(path, sizes=(32,)))
    (reason,) = unusable.values()
    assert "30x7" in reason
    files = find_images(config(folder, sizes=(32,)))[0]
    batches = [torch.cat([batch for _, batch in images.batches(32, 2)]) for images in (found, files)]
    assert sorted(map(str, batches[0].flatten(1).tolist())) == sorted(
        map(str, batches[1].flatten(1).tolist())
    )
    assert len(find_images(config(path, sizes=(32,), max_images=2))[0].names) <= 2
    tar = path.parent / "images-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b"IDAT", b"IDAt"))
    with pytest.raises(DataError, match="do not change the images"):
        list(found.batches(32, 2))
    with pytest.raises(DataError, match=r"none of its 4 images.*images-000000\.tar/[0-9a-f]{32}: .*checksum"):
        find_images(config(path, sizes=(32,)))


def test_remote_dataset_is_measured_like_a_local_one(tmp_path, monkeypatch):
    """A few images are those of some shards, so that no others are fetched."""
    pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")
    hurry(monkeypatch)
    path = write_shards(tmp_path / "data", 12, 40_000)
    with http_store(path.parent) as web:
        cache = str(tmp_path / "cache")
        few, _ = find_images(config(web.url(), sizes=(32,), max_images=3, cache_dir=cache))
        assert len(few.names) == 3
        assert 1 <= len(web.wholes()) < len(read_dataset(path).shards)
        found, _ = find_images(config(web.url(), sizes=(32,), cache_dir=cache))
        assert len(web.wholes()) == len(set(web.wholes())) == len(read_dataset(path).shards)
        local, _ = find_images(config(path, sizes=(32,)))
        assert found.names == local.names
        for name in found.names:
            assert torch.equal(found.read(name, 32), local.read(name, 32))
        assert torch.equal(few.read(few.names[-1], 32), local.read(few.names[-1], 32))


def test_square_is_the_center():
    pixels = np.arange(12 * 20 * 3, dtype=np.uint8).reshape(12, 20, 3)
    assert np.array_equal(square(pixels, 8, "center"), pixels[2:10, 6:14])
    assert np.array_equal(square(pixels, 12, "resize"), pixels[:, 4:16])  # already has the size


def test_square_scales_the_short_side():
    row = np.repeat(np.arange(0, 240, 10, dtype=np.uint8), 2)  # 48 columns in pairs
    pixels = np.broadcast_to(row[None, :, None], (32, 48, 3))
    found = square(np.ascontiguousarray(pixels), 16, "resize")
    assert found.shape == (16, 16, 3)
    assert abs(found[8, :, 0].astype(int) - np.arange(40, 200, 10)).max() <= 1
