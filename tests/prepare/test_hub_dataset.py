"""Datasets of the Hugging Face hub by name, against a stand-in: prepared, trained, evaluated."""

import json

import pytest

from tests.harness.hub_datasets import dataset_hub, write_parquet
from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import shard, without_workers
from tests.harness.runs import TINY, run_here
from vae.config.options import Config
from vae.shards import hub_files, store
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.system.errors import DataError, UserError
from vae.training.run import train

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
ANIMALS = ["cat", "dog"]
PHOTOS = "hf://datasets/someone/photos"


def pictures(first, count):
    return [encoded(detailed(number), "PNG") for number in range(first, first + count)]


def write_split(path, first, count):
    labels = [number % 2 for number in range(first, first + count)]
    write_parquet(path, pictures(first, count), labels, ANIMALS)


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
    (root / "main/someone/text").mkdir()
    (root / "main/someone/text/a.csv").write_text("a,b\n")
    return root


@pytest.fixture
def hub(root, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PAUSES", (0.01,))
    monkeypatch.setattr(store, "PAUSES_REFUSED", (0.01,))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("vae.prepare.hub_dataset.default_folder", lambda: tmp_path / "cache")
    with dataset_hub(root) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants._HF_DEFAULT_ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
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
    ("name", "said"),
    [
        (PHOTOS, r"has several splits, data/test, data/train: choose one, as in .*/photos/data/train$"),
        (f"{PHOTOS}/trian", r"/trian: it has no such split, only data/test, data/train$"),
        (f"{PHOTOS}@v2/train", r"photos@v2/: it does not exist \(404\), 2 times: correct the name"),
        ("hf://datasets/someone/none", r"access is denied \(401\), 2 times: .* run hf auth login$"),
        ("hf://datasets/photos", r"is not a dataset of the hub: give hf://datasets/OWNER/NAME\[/SPLIT\]$"),
        ("hf://datasets/someone/text", r"has no Parquet files.*hf download someone/text --repo-type dataset"),
    ],
)
def test_wrong_name_is_one_line_with_the_flag(hub, name, said):
    with pytest.raises((UserError, DataError), match=f"^--input_dir {said}|^--input_dir .*{said}") as caught:
        list(hub_files.parquet_files(name, "--input_dir"))
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


def test_no_network_and_no_package_are_one_line(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"--data_path .*: no connection, 2 times: check the network"):
        hub_files.parquet_files(f"{PHOTOS}/test", "--data_path")
    monkeypatch.setattr("fsspec.url_to_fs", missing_package)
    with pytest.raises(UserError, match=r"package huggingface_hub: pip install -r requirements-remote"):
        hub_files.parquet_files(f"{PHOTOS}/test", "--data_path")


def missing_package(*_words, **_options):
    raise ImportError("huggingface_hub")


@pytest.mark.slow
def test_run_reads_a_dataset_once_resumes_without_the_hub_and_is_evaluated(hub, tmp_path, capsys):
    given = {**TINY, "output_dir": str(tmp_path / "run"), "num_epochs": 1, "image_size": 16}
    given |= {"data_path": f"{PHOTOS}/train", "val_split": 0.25}
    with without_workers():
        assert train(given) == 0
    local = tmp_path / "cache/hub/someone--photos--train--val-0.25/dataset.json"
    validation = images_of(local.with_name("validation.json"))
    training = images_of(local)
    assert not validation.keys() & training.keys()
    assert validation.keys() | training.keys() == set(pictures(0, 12))
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data_path"] == str(local)
    asked = len(hub.requests)
    assert train({**given, "resume_from": "latest", "num_epochs": 2}) == 0
    assert len(hub.requests) == asked
    assert "uses its copy in" in capsys.readouterr().out
    words = (
        "--vae",
        tmp_path / "run/vae",
        "--data_path",
        f"{PHOTOS}/test",
        "--sizes",
        16,
        "--perceptual_net",
        "none",
    )
    with without_workers():
        done = run_here("evaluate_vae.py", *words, "--output_dir", tmp_path / "results")
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
    folders = sorted(path.name for path in (tmp_path / "cache/hub").iterdir() if path.is_dir())
    assert folders == ["someone--photos--test--val-0", "someone--photos--train--val-0"]
    assert Config().data.val_split == 0.1  # the share that is set aside without --val_path
