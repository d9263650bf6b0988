"""Other programs read the shards: tarfile, and WebDataset if it is installed."""

import io
import json
import tarfile
from hashlib import sha256

import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from tests.harness.shards import pack
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages

IMAGES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of PNG and JPEG files in shards of at most 30 kB."""
    root = tmp_path_factory.mktemp("engines")
    (root / "raw").mkdir()
    for number in range(IMAGES):
        kind = ("PNG", "JPEG")[number % 2]
        data = encoded(detailed(seed=number), kind)
        (root / "raw" / f"{number:02}.{kind.lower()}").write_bytes(data)
    return pack_small(root)


def pack_small(root):
    return pack(root / "raw", root / "set", shard_bytes=30_000, val_split=0.25).parent


@pytest.fixture(scope="module")
def images(folder):
    """The bytes of all images, by key."""
    found = [
        ShardImages([read_dataset(folder / name)], num_streams=1)
        for name in ("dataset.json", "validation.json")
    ]
    assert sum(map(len, found)) == IMAGES
    return {subset.key(number): subset.read(number) for subset in found for number in range(len(subset))}


def tars(folder):
    paths = sorted(folder.glob("*.tar"))
    assert len(paths) > 3
    return paths


def members(path):
    """(name, position of its header, of its first byte, bytes) of each member."""
    with tarfile.open(path) as tar:
        return [(m.name, m.offset, m.offset_data, tar.extractfile(m).read()) for m in tar]


def test_tarfile_finds_the_original_bytes(folder, images):
    found = {name: data for path in tars(folder) for name, _, _, data in members(path)}
    pictures = {name.split(".")[0]: data for name, data in found.items() if not name.endswith(".json")}
    assert pictures == images
    assert all(sha256(data).hexdigest().startswith(key) for key, data in pictures.items())
    for key, data in pictures.items():
        about = json.loads(found[f"{key}.json"])
        assert Image.open(io.BytesIO(data)).size == (about["width"], about["height"])


def test_shards_have_the_bytes_that_tarfile_writes(folder):
    for path in tars(folder):
        expected = io.BytesIO()
        with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, _, _, data in members(path):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        assert path.read_bytes() == expected.getvalue()


def test_webdataset_reads_the_shards(folder, images):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    urls = [f"file:{path}" for path in tars(folder)]
    found = {}
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        (kind,) = {"jpg", "png"} & sample.keys()
        assert json.loads(sample["json"])["key"] == sample["__key__"]
        found[sample["__key__"]] = sample[kind]
    assert found == images
