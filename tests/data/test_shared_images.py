"""Validation images that are training images too are found, whatever path leads to them."""

import os
import shutil
import sys

import pytest

from tests.harness.shards import pack
from vae.config.options import build
from vae.data import image_sets
from vae.data.dataset import FolderImages
from vae.data.exclude_list import read_exclude_list
from vae.data.image_sets import NotComparedError, find_shared_images
from vae.images.folder import list_images
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError
from vae.training.datasets import find_images


def shared(train, validation, exclude=None):
    return find_shared_images(opened(train), opened(validation), exclude)


def opened(path):
    if str(path).endswith(".json"):
        return ShardImages([read_dataset(path)], None)
    return FolderImages(path, list_images(path))


@pytest.fixture
def data(image_folder, tmp_path):
    """A folder with 8 images, and 8 more in its folder `inner`."""
    return shutil.copytree(image_folder, tmp_path / "data")


def test_one_folder_in_another_by_any_path(data, tmp_path):
    paths = [(data, data / "inner", 8), (data / "inner", data, 8), (data, data, 16)]
    paths += [(data, data.parent / "data" / "inner" / ".." / "inner", 8)]
    if sys.platform == "win32":
        paths += [(data, data.parent / "DATA" / "INNER", 8)]
    else:
        (tmp_path / "all").symlink_to(data)
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "linked").symlink_to(data / "inner")
        paths += [(tmp_path / "all", data / "inner", 8), (data, tmp_path / "more", 8)]
    for train, validation, count in paths:
        pairs = shared(train, validation)
        assert len(pairs) == count, (train, validation)
        assert all(os.path.samefile(validation / ours, train / theirs) for ours, theirs in pairs)


def test_copies_and_hard_links_with_other_names(data, other_images, tmp_path):
    validation = shutil.copytree(other_images, tmp_path / "val")
    assert shared(data, validation) == []
    shutil.copy(data / "image_00.png", validation / "copy.jpg")
    os.link(data / "inner" / "image_01.png", validation / "link.png")
    assert shared(data, validation) == [("copy.jpg", "image_00.png"), ("link.png", "inner/image_01.png")]


def test_excluded_training_images_are_not_shared(data, tmp_path):
    names = sorted(f"inner/{path.name}" for path in (data / "inner").iterdir())
    (tmp_path / "exclude.txt").write_text("\n".join(names[1:]))
    exclude = read_exclude_list(str(tmp_path / "exclude.txt"))
    assert shared(data, data / "inner", exclude) == [(names[0].removeprefix("inner/"), names[0])]


def test_folders_and_shards(data, tmp_path):
    dataset = pack(data, tmp_path / "set", val_split=0.0)
    for train, validation, count in ((dataset, data / "inner", 8), (data / "inner", dataset, 8)):
        assert len(shared(train, validation)) == count


def test_sets_that_take_minutes_are_not_compared_and_the_same_folder_is(data, other_images, monkeypatch):
    monkeypatch.setattr(image_sets, "MAX_FILES", 15)
    with pytest.raises(NotComparedError, match="has 16 images"):
        shared(data, other_images)
    assert len(shared(data, data / "inner")) == 8
    monkeypatch.undo()
    monkeypatch.setattr(image_sets, "MAX_BYTES", 100)
    with pytest.raises(NotComparedError, match="GiB of files have equal sizes"):
        shared(data, shutil.copytree(data, data.with_name("copy")))


def test_training_refuses_them_with_examples(data):
    config = build({"data_path": str(data), "val_path": str(data / "inner")})
    with pytest.raises(
        DataError, match=r"--val_path .*8 of its 8 images are training .*image_01\.png \(inner/"
    ):
        find_images(config)
