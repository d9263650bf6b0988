"""--mode validate of a dataset on a web server: the store's bytes."""

import json

import pytest

from tests.harness.http_store import http_store, hurry
from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare
from tests.harness.runs import run_script
from tests.harness.shards import write_shards
from vae.prepare.verify import verify_shard
from vae.shards.dataset_json import read_dataset

pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """30 images in shards of about 8 images and 90 kB."""
    folder = write_shards(tmp_path_factory.mktemp("store"), 30, 90_000).parent
    assert len(read_dataset(folder / "dataset.json").shards) >= 4
    return folder


@pytest.fixture
def web(root, tmp_path, monkeypatch):
    """A copy of the dataset that the test may damage, on a server."""
    hurry(monkeypatch)
    (tmp_path / "copy").mkdir()
    for path in (*root.glob("*.tar"), *root.glob("*.npy"), root / "dataset.json"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    with http_store(tmp_path / "copy") as server:
        yield server


def verify(web, number):
    """The reasons of the problems of a shard."""
    dataset = read_dataset(web.url(), flag="--input_dir")
    return [one.reason for one in verify_shard(dataset, 10**6, dataset.shards[number])]


def test_command_verifies_the_bytes_of_the_store(web, tmp_path):
    """Without showing the password, in the report either."""
    address = web.url(login="me:pa55word@")
    flags = ("--num_workers", "1", "--cache_dir", str(tmp_path / "cache"))
    words = ("--mode", "validate", "--input_dir", address, *flags)
    done = run_script("prepare_data.py", *words, "--output_file", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.json").read_text()
    assert json.loads(report)["problems"] == []
    assert json.loads(report)["samples"] == 30
    assert "pa55word" not in done.stdout + done.stderr + report
    names = [shard.name for shard in read_dataset(web.root / "dataset.json").shards]
    assert sorted(web.wholes()) == names


def test_damage_at_the_store_is_found(web):
    tar = web.root / "images-000000.tar"
    data = bytearray(tar.read_bytes())
    data[3000] ^= 1
    tar.write_bytes(data)
    index = web.root / "images-000001.npy"
    index.write_bytes(index.read_bytes()[:-9])
    (web.root / "images-000002.tar").unlink()
    found = [verify(web, number) for number in range(4)]
    assert found == [["checksum"], ["bad_index"], ["missing"], []]


def test_growth_beside_a_dataset_on_a_store_reads_its_indexes_only(web, root, tmp_path):
    source = tmp_path / "raw"
    source.mkdir()
    for path in sorted((root.parent / "raw").iterdir())[:3]:
        (source / path.name).write_bytes(path.read_bytes())
    (source / "new.png").write_bytes(encoded(detailed(99), "PNG"))
    words = ("--mode", "shard", "--input_dir", source, "--output_dir", tmp_path / "new", "--val_split", "0")
    prepare(*words, "--beside", web.url(), code=0, says="left out       3  in_other_dataset")
    assert read_dataset(tmp_path / "new" / "dataset.json").samples == 1
    assert web.wholes() == []
    (web.root / "images-000001.npy").unlink()
    done = prepare(*words[:-4], "--output_dir", tmp_path / "other", "--beside", web.url())
    assert (done.returncode, "images-000001.npy" in done.stderr, "Traceback" in done.stderr) == (
        77,
        True,
        False,
    )
