"""--exclude finds images by name and key; validation images that are training images are found."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare
from tests.harness.shards import pack
from tests.harness.tars import write_img2dataset
from tests.harness.training_runs import last_checkpoint
from vae.config.options import DataConfig, build
from vae.config.trained_vae_flags import EvaluateConfig
from vae.data import image_sets
from vae.data.dataset import CropDataset
from vae.data.exclude_list import Excluded, read_exclude_list, refuse_unmatched
from vae.data.image_files import FolderImages
from vae.data.image_sets import NotComparedError, find_shared_images
from vae.data.loading import TrainLoader
from vae.evaluation.image_set import find_images
from vae.images.folder import list_images
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training import datasets
from vae.training.run import train

COUNT = 12  # images of a folder, and of a dataset of shards


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {f"a/{number:02}.png": encoded(detailed(number), "PNG") for number in range(COUNT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("folder")
    rows = []
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        rows.append({"path": name, "sha256": sha256(data)})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def own(folder, tmp_path_factory):
    """The images in two shards."""
    dataset = pack(folder, tmp_path_factory.mktemp("own") / "set", shard_bytes=90_000)
    assert len(read_dataset(dataset).shards) == 2
    return dataset


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Tar files of others with an index."""
    root = tmp_path_factory.mktemp("foreign")
    words = ("--input", write_img2dataset(root / "tars"), "--output_dir", root / "set")
    prepare("--mode", "index", *words, code=0)
    return root / "set/dataset.json"


def write_list(path: Path, *keys: str) -> str:
    (path / "list.txt").write_text("".join(f"{key}\n" for key in keys))
    return str(path / "list.txt")


def names_of(images, tmp_path, *lines) -> list[str]:
    """The names of the images that these lines exclude; three processes find the same together."""
    listed = read_exclude_list(write_list(tmp_path, *lines))
    indices = images.find(listed.names, listed.keys)
    shares = [images.find(listed.names, listed.keys, rank, 3) for rank in range(3)]
    assert np.unique(np.concatenate(shares)).tolist() == indices.tolist()
    return [images.name(index) for index in indices.tolist()]


def test_files_are_found_by_name(folder, files, tmp_path):
    """Their SHA-256 are not read for this: a list that has some is refused."""
    images = FolderImages(folder, list(files))
    assert names_of(images, tmp_path, "a/01.png", "./a/02.png", "a/99.png", "") == ["a/01.png", "a/02.png"]
    key = sha256(files["a/03.png"])
    with pytest.raises(UserError, match=rf"--exclude lists the SHA-256 {key[:32]}, .*list their names"):
        names_of(images, tmp_path, "a/01.png", key)


def test_manifest_gives_keys(folder, files, tmp_path):
    images = FolderImages("nowhere", list(files), str(folder / "manifest.jsonl"))  # no file is read
    keys = [sha256(files[f"a/{n:02}.png"]) for n in range(5)]
    lines = ["a/01.png", keys[2].upper(), keys[3][:32], f"{keys[4]}  photo.png", 64 * "f"]
    assert names_of(images, tmp_path, *lines) == [f"a/{n:02}.png" for n in (1, 2, 3, 4)]


def test_shards_are_found_by_hash_and_name(own, files, tmp_path, monkeypatch):
    images, key = ShardImages([read_dataset(own)], 1), sha256(files["a/00.png"])
    last = images.name(COUNT - 1)
    assert names_of(images, tmp_path, key, last, "images-000000.tar/no") == [images.name(0), last]
    assert images.key(0) == key[:32]
    read = []
    monkeypatch.setattr(ShardImages, "rows", lambda self, number: read.append(number) or self._index(number))
    assert names_of(images, tmp_path, last)
    assert set(read) == {1}  # no other index is needed for a name


def test_tars_of_others_are_found_by_member(foreign, tmp_path):
    images, name = ShardImages([read_dataset(foreign)], 1), "00000.tar/000000003.jpg"
    assert names_of(images, tmp_path, name, sha256(images.read(12))) == [name, images.name(12)]
    assert names_of(images, tmp_path, "000000003.jpg") == []  # a name of many tar files


def test_several_datasets_are_all_searched(own, foreign, files, tmp_path):
    images = ShardImages([read_dataset(path) for path in (own, foreign)], 1)
    found = names_of(images, tmp_path, sha256(files["a/05.png"]), "00001.tar/000000019.jpg")
    assert [name.rpartition(":")[0] for name in found] == [str(own), str(foreign)]
    assert names_of(images, tmp_path, *found) == found  # as messages print them


def test_only_the_places_of_excluded_images_are_empty(folder, files):
    images = FolderImages(folder, list(files))

    def batches(excluded: Excluded) -> list[tuple[list[int], int]]:
        crops = CropDataset(images, DataConfig(), image_size=32, excluded=excluded)
        with TrainLoader(crops, local_batch=4) as loader:
            return [(batch.indices.tolist(), batch.excluded) for batch in loader.batches(1)]

    left_out = {2, 3, 7}
    expected = [
        ([i for i in batch if i not in left_out], len(left_out & {*batch}))
        for batch, _ in batches(Excluded())
    ]
    assert batches(Excluded(np.array(sorted(left_out)))) == expected
    assert sum(count for _, count in expected) == 3


@pytest.mark.parametrize(
    ("line", "example"), [("b/0.png", "b/0.png"), (f"{7:064x}", 32 * "0"), ("", "no line")]
)
def test_a_list_of_no_image_is_refused_with_an_example(line, example, tmp_path):
    with pytest.raises(UserError, match=rf"--exclude .*list\.txt.*{example}.*omit the flag"):
        refuse_unmatched(read_exclude_list(write_list(tmp_path, line)))


def test_list_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--exclude .* cannot be read"):
        read_exclude_list(str(tmp_path / "none.txt"))
    assert not read_exclude_list(write_list(tmp_path)).names
    monkeypatch.setattr("vae.data.exclude_list.MAX_BYTES", 2**20)
    (tmp_path / "list.txt").write_bytes(bytes(2**20 + 1))
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_exclude_list(str(tmp_path / "list.txt"))


def test_evaluation_leaves_out_excluded_images(folder, files, tmp_path, capsys):
    config = {"vae": ("x",), "data_path": str(folder), "output_dir": "x", "sizes": (32,)}
    listed = write_list(tmp_path, "a/00.png", "a/06.png", "nothing")
    found, _ = find_images(EvaluateConfig(**config, exclude=listed))
    assert found.names == [name for name in files if name not in ("a/00.png", "a/06.png")]
    assert "exclude 2 chosen images are left out\n" in capsys.readouterr().out
    found, _ = find_images(EvaluateConfig(**config, exclude=listed, max_images=4))
    four, _ = find_images(EvaluateConfig(**config, max_images=4))
    assert len(four.names) == 4
    # its choice does not depend on the list
    assert found.names == [name for name in four.names if name not in ("a/00.png", "a/06.png")]
    with pytest.raises(DataError, match="has all 12 chosen images"):
        find_images(EvaluateConfig(**config, exclude=write_list(tmp_path, *files)))


def test_run_leaves_out_the_images_of_a_list_and_records_it(tiny, tmp_path, capsys):
    gone = ["image_00.png", "image_02.png", "inner/image_01.png"]
    listed = write_list(tmp_path, *gone, "nothing")
    assert train({**tiny, "exclude": listed, "max_steps": 1}) == 0
    assert "images are left out\n" in capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "split.json").read_text())
    assert len(found["train"] + found["validation"]) == 13
    assert not set(gone) & set(found["train"] + found["validation"])
    training = last_checkpoint(tmp_path / "run")["provenance"]["training"]
    assert training["exclude"] == sha256(Path(listed).read_bytes())


# ---- Images of both sets -----------------------------------------------------------------------------------


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
    for train_path, validation, count in paths:
        pairs = shared(train_path, validation)
        assert len(pairs) == count, (train_path, validation)
        assert all(os.path.samefile(validation / ours, train_path / theirs) for ours, theirs in pairs)


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
        datasets.find_images(config)
