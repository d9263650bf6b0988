"""A dataset of shards is read by number and checksum; everything that is wrong with it has a reason."""

import os
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.harness.damaged_files import flip_bit
from tests.harness.shards import pack, write_shards
from vae.data.dataset import CropDataset
from vae.data.loading import TrainLoader
from vae.images.decoding import INTEGRITY_CHECKS, decode_image
from vae.images.formats import BadImageError
from vae.shards import shard_images
from vae.shards.dataset_json import index_path, read_dataset, read_index
from vae.shards.shard_images import ShardImages


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the image files of `image_folder`'s kind, and a dataset of them in three shards."""
    root = tmp_path_factory.mktemp("shards")
    random = np.random.default_rng(0)
    (root / "raw").mkdir()
    for number in range(12):
        pixels = random.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "raw" / f"{number:02}.{'jpg' if number % 3 else 'png'}")
    pack(root / "raw", root / "set")
    return root


@pytest.fixture
def dataset(written, tmp_path):
    """A copy of the dataset that the test may damage."""
    return shutil.copytree(written / "set", tmp_path / "set") / "dataset.json"


def images(path) -> ShardImages:
    return ShardImages([read_dataset(path)], num_streams=1)


def test_pixels_are_those_of_the_files(written, dataset):
    sharded = images(dataset)
    by_key = {sharded.key(n): sharded.decode(n, max_pixels=10**6, background="white") for n in range(12)}
    assert len(by_key) == 12
    found = sorted(pixels.tobytes() for pixels in by_key.values())
    assert found == sorted(decode_image(path).tobytes() for path in (written / "raw").iterdir())


def test_verified_bytes_are_not_checked_again(dataset, monkeypatch):
    """The crc32 of the index covers what the checksums within a PNG cover."""
    sharded = images(dataset)
    monkeypatch.setitem(INTEGRITY_CHECKS, "PNG", lambda file, flags: pytest.fail("checked again"))
    for number in range(12):
        sharded.decode(number, max_pixels=10**6, background="white")


# ---- damage ------------------------------------------------------------------------------------------------


def test_flipped_bit_costs_one_image(dataset):
    rows = np.load(index_path(dataset.parent, "images-000000.tar"))
    flip_bit(dataset.parent / "images-000000.tar", int(rows["offset"][3]) + 50)
    crops = CropDataset(images(dataset), image_size=32)
    rejected = [crops[0, n].rejection for n in range(12)]
    assert [n for n, one in enumerate(rejected) if one] == [3]
    assert rejected[3].reason == "checksum"
    assert rejected[3].name == f"images-000000.tar/{rows['key'][3].decode()}"


def test_truncated_or_missing_shard_costs_its_images(dataset):
    tar = dataset.parent / "images-000000.tar"
    tar.write_bytes(tar.read_bytes()[:3000])
    with pytest.raises(BadImageError, match="truncated"):
        images(dataset).read(11)
    tar.unlink()
    with pytest.raises(BadImageError, match="missing_shard"):
        images(dataset).read(0)


def test_index_with_any_other_bytes_is_refused(dataset):
    path = index_path(dataset.parent, "images-000000.tar")
    good = path.read_bytes()
    for content in (b"", good[:-1], good + bytes(10**6), good[:100] + b"?" + good[101:]):
        path.write_bytes(content)
        with pytest.raises(BadImageError, match=r"bad_index.*not the index that the dataset lists"):
            images(dataset).read(0)


def test_a_sample_has_images_of_few_shards_of_all_datasets(tmp_path):
    paths = [write_shards(tmp_path / name, count=12, shard_bytes=30_000) for name in ("first", "second")]
    images = ShardImages([read_dataset(path) for path in paths], 1)
    assert images.num_shards > 8
    assert images.sample(24).tolist() == images.sample(10**9).tolist() == list(range(24))
    some = images.sample(6)
    assert (some < 12).sum() == 3
    assert (np.diff(some) > 0).all()
    assert len({images.locate(index)[0] for index in some.tolist()}) <= 4


def test_sizes_come_from_indexes(tmp_path):
    """Those of a bad index are unknown."""
    path = write_shards(tmp_path, count=12, shard_bytes=30_000)
    images, shards = ShardImages([read_dataset(path)], 1), read_dataset(path).shards
    assert len(shards) > 4
    (path.parent / "images-000001.npy").unlink()
    bad = [n for n in range(12) if images.locate(n)[0] == 1]
    wanted = np.array([11, bad[0], 0])
    assert images.sizes(wanted).tolist() == [[64, 64], [0, 0], [64, 64]]
    assert images.sizes(wanted[:0]).shape == (0, 2)


def test_indexes_of_open_windows_are_read_once(tmp_path, monkeypatch):
    dataset = write_shards(tmp_path, count=12, shard_bytes=30_000)
    read, calls = read_index, []
    monkeypatch.setattr(shard_images, "read_index", lambda *args: calls.append(args) or read(*args))
    sharded = images(dataset)
    for _ in range(3):
        for number in range(12):
            sharded.read(number)
    assert len(calls) == len(sharded.datasets[0].shards) > 3
    monkeypatch.setattr(shard_images, "INDEX_BYTES", 0)
    monkeypatch.setattr(shard_images, "MIN_INDEXES", 2)
    sharded, calls[:] = images(dataset), []
    for shard in (0, 1, 0, 2, 0):  # the first one is used again and stays
        sharded.read(int(sharded.firsts[shard]))
    assert len(calls) == 3


def test_metadata_is_the_json_file_of_the_image(dataset):
    sharded = images(dataset)
    found = sharded.metadata(11)
    assert (found["key"], found["width"], found["type"][:6]) == (sharded.key(11), 48, "image/")
    shard = sharded.datasets[0].shards[0]
    with tarfile.open(dataset.parent / shard.name) as tar:
        member = tar.getmembers()[1]
    flip_bit(dataset.parent / shard.name, member.offset_data)  # its first brace
    assert images(dataset).metadata(0) == {"source": sharded.key(0)}
    flip_bit(dataset.parent / shard.name, member.offset)  # its name
    assert images(dataset).metadata(0) == {"source": sharded.key(0)}
    os.truncate(dataset.parent / shard.name, member.offset)
    assert images(dataset).metadata(0) == {"source": sharded.key(0)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_count_what_was_read(dataset, num_workers):
    crops = CropDataset(images(dataset), image_size=32)
    sizes = np.load(index_path(dataset.parent, "images-000000.tar"))["size"]
    with TrainLoader(crops, local_batch=4, num_workers=num_workers) as loader:
        counts = [batch.counts for batch in loader.batches(0)]
    assert sum(one["disk_bytes"] for one in counts) == sizes.sum()
