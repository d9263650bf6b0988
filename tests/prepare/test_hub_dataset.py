"""Datasets of the Hugging Face hub by name, against a stand-in: prepared, trained, evaluated."""

import json
import os
from functools import partial
from pathlib import Path

import duckdb
import pytest

from tests.harness.faults import limit_file_size
from tests.harness.hub_datasets import dataset_hub, write_parquet
from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import shard, without_workers
from tests.harness.runs import TINY, run_here
from vae.config.options import Config
from vae.prepare.hub_dataset import local_dataset
from vae.shards import hub_files, store
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training.run import train

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
ANIMALS = ["cat", "dog"]
PHOTOS = "hf://datasets/someone/photos"


def pictures(first, count):
    return [encoded(detailed(number), "PNG") for number in range(first, first + count)]


def write_split(path, first, count):
    labels = [number % 2 for number in range(first, first + count)]
    write_parquet(path, pictures(first, count), labels, ANIMALS)


def write_two_columns(path):
    path.parent.mkdir(parents=True)
    image = "{'bytes': ?::BLOB, 'path': 'a.png'}"
    query = f"COPY (SELECT {image} AS before, {image} AS after) TO '{path}' (FORMAT parquet)"
    duckdb.execute(query, pictures(0, 2))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dataset with Parquet files, and one of image files that the hub has converted."""
    root = tmp_path_factory.mktemp("hub")
    photos = root / "main/someone/photos/data"
    write_split(photos / "train-00000-of-00002.parquet", 0, 6)
    write_split(photos / "train-00001-of-00002.parquet", 6, 6)
    write_split(photos / "test-00000-of-00001.parquet", 12, 4)
    (root / "main/someone/files").mkdir()
    (root / "main/someone/files/1.png").write_bytes(pictures(0, 1)[0])
    write_split(root / "refs/convert/parquet/someone/files/default/partial-train/0000.parquet", 0, 3)
    write_two_columns(root / "main/someone/pairs/data/train.parquet")
    (root / "main/someone/text").mkdir()
    (root / "main/someone/text/a.csv").write_text("a,b\n")
    return root


@pytest.fixture
def hub(root, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PAUSES", (0.01,))
    monkeypatch.setattr(store, "PAUSES_REFUSED", (0.01,))
    monkeypatch.setattr("vae.prepare.hub_dataset.default_folder", lambda: tmp_path / "cache")
    with dataset_hub(root, monkeypatch) as server:
        yield server
    assert all(request.startswith(("GET", "HEAD", "POST")) for request in server.requests)
    assert all("paths-info" in request for request in server.requests if request.startswith("POST"))


def images_of(path):
    images = ShardImages([read_dataset(path)], 1)
    return {images.read(number): images.metadata(number) for number in range(len(images))}


@pytest.mark.parametrize(
    ("name", "first", "count"),
    [
        (f"{PHOTOS}/train", 0, 12),
        (f"{PHOTOS}/data/test", 12, 4),
        (f"{PHOTOS}@main/test", 12, 4),
        (f"{PHOTOS}/data/", 0, 16),
        (f"{PHOTOS}/data/train-00001-of-00002.parquet", 6, 6),
        ("hf://datasets/someone/files", 0, 3),
        ("hf://datasets/someone/files@refs/convert/parquet/train", 0, 3),
    ],
)
def test_images_of_a_split_have_their_bytes_and_the_names_of_labels(hub, tmp_path, name, first, count):
    done = shard(name, tmp_path / "set", "--val_split", 0, code=0)
    found = images_of(tmp_path / "set/dataset.json")
    expected = dict(zip(pictures(first, count), range(first, first + count), strict=True))
    assert {data: metadata["label"] for data, metadata in found.items()} == {
        data: ANIMALS[number % 2] for data, number in expected.items()
    }
    assert ("reads its first 5 GB" in done.stdout + done.stderr) == ("files" in name)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("someone/photos", "data/test, data/train"),  # choose a split
        ("someone/photos/trian", "data/test, data/train"),
        ("someone/photos@v2/train", "404"),
        ("someone/none", "401"),
        ("photos", "OWNER/NAME"),
        ("someone/text", "hf download someone/text"),
    ],
)
def test_wrong_name_is_one_line_with_the_flag(hub, name, part):
    with pytest.raises((UserError, DataError), match=f"^--input_dir .*{part}") as caught:
        list(hub_files.parquet_files(f"hf://datasets/{name}", "--input_dir"))
    assert "\n" not in str(caught.value)


def test_private_dataset_needs_the_token(hub, monkeypatch):
    hub.private.add("someone/photos")
    with pytest.raises(DataError, match=r"access is denied \(401\).*run hf auth login"):
        hub_files.parquet_files(f"{PHOTOS}/test", "--data_path")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    clear_cache()
    assert hub_files.parquet_files(f"{PHOTOS}/test", "--data_path") == [
        f"{PHOTOS}/data/test-00000-of-00001.parquet"
    ]


def clear_cache():
    from huggingface_hub import HfFileSystem

    HfFileSystem.clear_instance_cache()


@pytest.mark.slow
def test_run_reads_a_dataset_once_resumes_without_the_hub_and_is_evaluated(hub, tmp_path, capsys):
    given = {**TINY, "output_dir": str(tmp_path / "run"), "num_epochs": 1, "image_size": 16}
    given |= {"data_path": f"{PHOTOS}/train", "val_split": 0.25}
    with without_workers():
        assert train(given) == 0
    local = tmp_path / "cache/vae-trainer-hub/someone--photos--train/val-0.25/dataset.json"
    validation = images_of(local.with_name("validation.json"))
    training = images_of(local)
    assert not validation.keys() & training.keys()
    assert validation.keys() | training.keys() == set(pictures(0, 12))
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data_path"] == [str(local)]
    asked = len(hub.requests)
    assert train({**given, "resume_from": "latest", "num_epochs": 2}) == 0
    assert len(hub.requests) == asked
    assert "uses its copy in" in capsys.readouterr().out
    words = ("--vae", tmp_path / "run/vae", "--data_path", f"{PHOTOS}/test", "--sizes", 16)
    with without_workers():
        words += ("--perceptual_net", "none", "--output_dir", tmp_path / "results")
        done = run_here("evaluate_vae.py", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results/results.json").read_text())["protocol"]["images"] == 4


@pytest.mark.slow
def test_validation_images_of_another_split_and_a_mistake_before_the_hub_is_asked(hub, tmp_path):
    given = {**TINY, "output_dir": str(tmp_path / "run"), "max_steps": 1, "image_size": 16}
    del given["val_split"]
    with pytest.raises(UserError, match="--background"):
        train({**given, "data_path": f"{PHOTOS}/train", "background": "nothing"})
    assert hub.requests == []
    with without_workers():
        assert train({**given, "data_path": f"{PHOTOS}/train", "val_path": f"{PHOTOS}/test"}) == 0
    folders = sorted(path.name for path in (tmp_path / "cache/vae-trainer-hub").iterdir() if path.is_dir())
    assert folders == ["someone--photos--test", "someone--photos--train"]
    assert Config().data.val_split == 0.1  # the share that is set aside without --val_path


@pytest.mark.slow
def test_cache_dir_has_the_copy_and_its_shards_are_not_copied_again(hub, tmp_path, capsys):
    given = {**TINY, "output_dir": str(tmp_path / "run"), "max_steps": 1, "image_size": 16}
    given |= {"data_path": f"{PHOTOS}/train", "val_split": 0.25, "cache_dir": str(tmp_path / "mine")}
    with without_workers():
        assert train(given) == 0
    (shards,) = (tmp_path / "mine").rglob("images-*.tar")
    assert shards.parent == tmp_path / "mine/vae-trainer-hub/someone--photos--train"
    assert not (tmp_path / "cache").exists()
    assert "cache   none, shards are read in place" in capsys.readouterr().out


def test_every_split_is_an_index_over_one_copy_that_is_fetched_once(hub, tmp_path):
    everything = set(pictures(0, 12))
    with without_workers():
        paths = [
            Path(local_dataset(f"{PHOTOS}/train", "--data_path", str(tmp_path), share))
            for share in (0.25, 0.5, 0.0, 0.25)
        ]
    gets = [request for request in hub.requests if request.startswith("GET") and ".parquet" in request]
    assert len(gets) == len(set(gets)) == 2
    assert len(list(tmp_path.rglob("*.tar"))) == 1
    for path, validating in zip(paths[:2], (3, 6), strict=True):
        train, val = images_of(path), images_of(path.with_name("validation.json"))
        assert (len(val), train.keys() | val.keys()) == (validating, everything)
        assert not train.keys() & val.keys()
        assert all("label" in metadata for metadata in val.values())
    assert images_of(paths[2]).keys() == everything
    assert paths[0] == paths[3]


def test_dataset_that_needs_other_flags_is_one_line(hub, tmp_path):
    message = "^--data_path hf://datasets/someone/pairs.* --image_column before .*--mode shard"
    with without_workers(), pytest.raises(UserError, match=message):
        local_dataset("hf://datasets/someone/pairs", "--data_path", str(tmp_path / "mine"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limits of file sizes")
def test_full_disk_is_one_line_and_the_same_command_continues(hub, tmp_path):
    copy = partial(local_dataset, f"{PHOTOS}/test", "--val_path", str(tmp_path / "mine"))
    with without_workers():
        limit_file_size(1000)
        try:
            with pytest.raises(UserError, match=r"^--val_path .*/test: .*mine.*: the disk is full"):
                copy()
        finally:
            limit_file_size(None)
        assert images_of(Path(copy())).keys() == set(pictures(12, 4))
