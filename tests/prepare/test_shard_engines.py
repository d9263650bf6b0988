"""Other programs read the shards: tarfile, WebDataset, NVIDIA Energon, and DALI's index.

The last three need packages that the test environment does not have; `pip install webdataset megatron-energon
nvidia-dali-cuda120` adds them.
"""

import io
import json
import struct
import tarfile
from hashlib import sha256

import numpy as np
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
        ShardImages(read_dataset(folder / name), num_streams=1)
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


def test_index_of_energon_has_the_start_of_each_sample_and_the_end(folder):
    for path in tars(folder):
        data = path.with_suffix(".tar.idx").read_bytes()
        *starts, end = struct.unpack(f"<{len(data) // 8}Q", data)
        found = members(path)
        assert starts == [header for name, header, _, _ in found if not name.endswith(".json")]
        with path.open("rb") as file:
            file.seek(end)
            assert not any(file.read())  # the rest is the zeros that end a tar file
        assert end > found[-1][2]


def test_index_of_dali_has_position_and_size_of_each_file(folder):
    for path in tars(folder):
        first, *lines = path.with_suffix(".idx").read_text().splitlines()
        found = members(path)
        assert first == f"v1.2 {len(lines)}"
        words = [line.split(" ") for line in lines]
        entries = [tuple(line[n : n + 4]) for line in words for n in (0, 4)]
        assert entries == [(name.split(".")[1], str(at), str(len(data)), name) for name, _, at, data in found]


def test_metadata_of_energon_has_the_subsets_and_all_samples(folder):
    meta = folder / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    split = json.loads((meta / "split.yaml").read_text())["split_parts"]
    for subset, name in (("train", "dataset.json"), ("val", "validation.json")):
        shards = read_dataset(folder / name).shards
        assert split[subset] == [shard.name for shard in shards]
        assert {name: counts.pop(name) for name in split[subset]} == {s.name: s.samples for s in shards}
    assert counts == {}


def test_missing_index_of_another_program_is_written_again(folder):
    """As in a dataset from before these files existed: the same command adds them, and only them."""
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for path in folder.glob("images-*.idx"):
        path.unlink()
    pack_small(folder.parent)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_webdataset_reads_the_shards(folder, images):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    urls = [f"file:{path}" for path in tars(folder)]
    found = {}
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        (kind,) = {"jpg", "png"} & sample.keys()
        assert json.loads(sample["json"])["key"] == sample["__key__"]
        found[sample["__key__"]] = sample[kind]
    assert found == images


@pytest.mark.parametrize("subset", ["train", "val"])
def test_energon_reads_the_dataset(folder, images, subset):
    energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
    workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = energon.get_val_dataset(folder, split_part=subset, batch_size=1, worker_config=workers)
    found = {sample.__key__[0].rsplit("/")[-1]: sample.image[0] for sample in energon.get_loader(dataset)}
    name = {"train": "dataset.json", "val": "validation.json"}[subset]
    assert len(found) == read_dataset(folder / name).samples
    for key, image in found.items():
        pixels = np.asarray(Image.open(io.BytesIO(images[key])).convert("RGB"))
        assert np.array_equal((image.numpy() * 255).round().astype(np.uint8), pixels.transpose(2, 0, 1))


def test_index_of_dali_is_that_of_its_own_tool(folder, tmp_path):
    wds2idx = pytest.importorskip("wds2idx", reason="nvidia-dali is not installed")
    for path in tars(folder):
        with wds2idx.IndexCreator(str(path), str(tmp_path / path.name), verbose=False) as creator:
            creator.create_index()
        assert (tmp_path / path.name).read_text() == path.with_suffix(".idx").read_text()
