"""dataset.json is read into little memory; everything that is wrong with it is one line."""

import json
import os
import tracemalloc

import pytest

from vae.shards import dataset_json
from vae.shards.dataset_json import FORMAT, dataset_content, is_dataset, read_dataset
from vae.shards.index import Shard
from vae.shards.store import StoreFile
from vae.system.errors import DataError
from vae.system.files import MAX_JSON_BYTES


def test_many_shards_need_little_memory_and_are_read_once(tmp_path):
    """10,000 shards: as objects they would need 5.3 MiB."""
    names = [f"images-{n:06}.tar" for n in range(10_000)]
    shards = [Shard(name, 6000 + n, 10**9 + n, f"{n:064x}", f"{n:064x}") for n, name in enumerate(names)]
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(dataset_content(shards, {}, None)))
    tracemalloc.start()
    found = read_dataset(path)
    held, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.5 * 2**20
    assert [found.shards[n] for n in (0, 7_777, -1)] == [shards[n] for n in (0, 7_777, -1)]
    assert found.samples == sum(shard.samples for shard in shards)
    assert read_dataset(path) is found
    path.write_text(json.dumps(dataset_content(shards[:10], {}, None)))
    assert list(read_dataset(path).shards) == shards[:10]


SHARD = {
    "name": "images-000000.tar",
    "samples": 12,
    "bytes": 20000,
    "sha256": 64 * "0",
    "index_sha256": 64 * "1",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": FORMAT + 1}, "update it"),
        ({"format": "1"}, "is not a dataset"),
        ({"shards": []}, "lacks shards"),
        ({"shards": [SHARD, SHARD]}, "listed twice"),
        ({"shards": [{**SHARD, "name": "../images-000000.tar"}]}, "shard 0 is not valid"),
        ({"shards": [{**SHARD, "samples": -1}]}, "shard 0 is not valid"),
        ({"shards": [{**SHARD, "samples": 2**62, "bytes": 2**62}]}, "shard 0 is not valid"),
        ({"shards": [{**SHARD, "index_sha256": None}]}, "shard 0 is not valid"),
        ({"shards": [{name: SHARD[name] for name in list(SHARD)[:4]}]}, "does not fit its format"),
        ({"validation": "../validation.json"}, "validation is no file name"),
        ({"validation": "dataset.json"}, "it is its own validation"),
        ({"version": 64 * "0"}, "does not have its version"),
    ],
)
def test_dataset_that_is_not_valid_is_one_line(tmp_path, change, words):
    path = tmp_path / "dataset.json"
    content = dataset_content([], {}, None) | {"shards": [SHARD]} | change
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=words) as caught:
        read_dataset(path)
    assert str(caught.value).startswith(f"--data_path {path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tars", "words"),
    [
        ("tars", "no absolute path"),
        ("/a\0b", "no absolute path"),
        (r"\\host\share", "no absolute path" if os.name != "nt" else "network share"),
        ("//host/share", "network share"),
        ("file:///tars", "no absolute path"),
        ("https://host:99999/tars", "no valid host or port"),
    ],
)
def test_tars_of_a_stranger_name_no_share_and_no_odd_address(tmp_path, tars, words):
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(dataset_content([], {}, None, more={"tars": tars, "indexes": "indexes"})))
    with pytest.raises(DataError, match=words):
        read_dataset(path)


@pytest.mark.parametrize(
    ("address", "tars", "is_same"),
    [
        ("https://one/a/dataset.json", "https://one/b", True),
        ("https://one/a/dataset.json", "https://two/b", False),
        ("https://one/a/dataset.json", "http://one/b", False),
        ("https://one/a/dataset.json", "https://one:8080/b", False),
        ("s3://one/a/dataset.json", "s3://two/b", True),  # another bucket is no other host
        ("s3://one/a/dataset.json", "gs://one/b", False),
    ],
)
def test_remote_dataset_names_no_other_host(address, tars, is_same):
    content = dataset_content([], {}, None, more={"tars": tars, "indexes": "indexes"})
    problem = dataset_json._problem_of_place(content, StoreFile(address, "--data_path"))
    assert (problem is None) == is_same


def test_large_texts_are_refused_before_they_are_parsed(tmp_path):
    path = tmp_path / "dataset.json"
    path.write_text("[" + "{}," * (MAX_JSON_BYTES // 3) + "{}]")
    tracemalloc.start()
    with pytest.raises(DataError, match="larger than 16 MiB"):
        read_dataset(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MAX_JSON_BYTES
    content = dataset_content([], {}, None) | {"format": 3, "shard_lists": [{"name": "a.json"}] * 1000}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="lists of shards are not valid"):
        read_dataset(path)


OLD_SHARD = f"""{{"name": "images-000000.tar", "samples": 3, "bytes": 10240, "sha256": "{64 * "a"}" """
OLD_INDEX = f""", "index_sha256": "{64 * "b"}" """
OLD_TEXTS = {  # as earlier versions wrote them
    1: f"""{{"format": 1, "version": "a9b5ef48c63dd29df675e343cd8b39fb6a25de14d7c75373f57e077f657e49e7",
        "parent": null, "policy": {{"min_size": 1}},
        "transforms": {{}}, "validation": "validation.json", "shards": [{OLD_SHARD}}}]}}""",
    2: f"""{{"version": "d1b2181c0e04d137bff32cfc2d876356f264a5e582c8bb023938c1ef3a034ad7",
        "format": 2, "parent": null, "policy": {{"min_size": 1}},
        "transforms": {{}}, "validation": null, "shards": [{OLD_SHARD}{OLD_INDEX}}}]}}""",
    3: f"""{{"version": "313187b449943f43b8018f24b34056757f6e2be3b225d879abde924434266e72",
        "format": 3, "parent": "{64 * "c"}", "policy": {{}}, "transforms": {{}},
        "tars": "/data/laion", "indexes": "indexes", "changes": {{}}, "validation": null,
        "shards": [{OLD_SHARD}{OLD_INDEX}}}]}}""",
}


@pytest.mark.skipif(os.name == "nt", reason="/data is no absolute path")
@pytest.mark.parametrize("format", [1, 2, 3])
def test_datasets_of_earlier_versions_are_read(tmp_path, format):
    (tmp_path / "dataset.json").write_text(OLD_TEXTS[format])
    found = read_dataset(tmp_path / "dataset.json")
    index = 64 * "b" if format > 1 else None
    assert list(found.shards) == [Shard("images-000000.tar", 3, 10240, 64 * "a", index)]
    assert (found.tars, found.indexes) == (("/data/laion", "indexes") if format == 3 else (None, ""))


def test_dataset_whose_removed_images_would_come_back_is_refused(tmp_path):
    (tmp_path / "dataset.json").write_text(OLD_TEXTS[3].replace('"changes"', '"removed_keys"'))
    with pytest.raises(DataError, match=r"removed_keys.*--exclude"):
        read_dataset(tmp_path / "dataset.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, "\0"])
def test_other_file_is_no_dataset(tmp_path, text):
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match="is not a dataset of shards"):
        read_dataset(tmp_path / "dataset.json")


def test_missing_dataset_names_the_mode_that_writes_one(tmp_path):
    assert is_dataset(tmp_path / "dataset.json")
    with pytest.raises(DataError, match="--mode shard"):
        read_dataset(tmp_path / "dataset.json")


def test_long_list_of_shards_is_split(tmp_path, monkeypatch):
    """The version is that of the content; a damaged or missing part is named."""
    shards = [Shard(f"images-{n:06}.tar", 3, 10_000, f"{n:064x}", f"{n:064x}") for n in range(25)]
    monkeypatch.setattr(dataset_json, "MAX_LISTED", 10)
    path = tmp_path / "dataset.json"
    dataset_json.write_dataset(path, dataset_content(shards, {}, None))
    parts = sorted(tmp_path.glob("dataset-shards-*.json"))
    assert [len(json.loads(part.read_text())) for part in parts] == [10, 10, 5]
    assert json.loads(path.read_text())["shards"] == []
    assert list(read_dataset(path).shards) == shards
    text = parts[1].read_text()
    parts[1].write_text(text.replace('"samples": 3', '"samples": 4'))
    os.utime(path, (1, 1))  # dataset.json itself has not changed
    with pytest.raises(DataError, match=r"dataset-shards-000001\.json does not have the SHA-256"):
        read_dataset(path)
    parts[1].unlink()
    os.utime(path, (2, 2))
    with pytest.raises(DataError, match=r"dataset-shards-000001\.json is missing"):
        read_dataset(path)
    content = dataset_content(shards, {}, None)
    monkeypatch.setattr(dataset_json, "MAX_LISTED", 100)
    assert content["format"] == 3
    assert dataset_content(shards, {}, None)["format"] == 2  # as before
