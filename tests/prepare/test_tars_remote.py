"""--mode index of tar files on a web server: nothing is copied, and the dataset is read like a local one."""

import shutil

import pytest

from tests.harness.http_store import http_store, hurry
from tests.harness.preparing import prepare
from tests.harness.tars import images_of, write_webdataset
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_cache import open_cache
from vae.shards.shard_images import ShardImages

pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")


@pytest.fixture
def web(tmp_path, monkeypatch):
    hurry(monkeypatch)
    write_webdataset(tmp_path / "web" / "tars")
    with http_store(tmp_path / "web") as server:
        yield server


def index(web, output, *flags, **expected):
    pattern = web.url("tars/kodak-{000000..000002}.tar")
    return prepare("--mode", "index", "--input", pattern, "--output_dir", output, *flags, **expected)


def read_all(path, cache):
    dataset = read_dataset(path)
    images = ShardImages([dataset], 1, open_cache([dataset], str(cache), 1.0))
    return {images.name(n): images.read(n) for n in range(len(images))}, images


def test_dataset_here_reads_tars_there(web, tmp_path):
    index(web, tmp_path / "set", code=0)
    path, tars = tmp_path / "set" / "dataset.json", sorted((web.root / "tars").glob("*.tar"))
    assert read_dataset(path).store is not None
    found, images = read_all(path, tmp_path / "cache")
    assert found == images_of(*tars)
    assert images.metadata(3) == {"source": "class1/000003.png", "caption": "a text", "label": "1"}
    version = read_dataset(path).version
    assert index(web, tmp_path / "set").returncode == 0  # again
    prepare("--mode", "index", "--input", web.root / "tars", "--output_dir", tmp_path / "local", code=0)
    assert read_dataset(tmp_path / "local" / "dataset.json").version == version


def test_dataset_beside_its_tars_is_read_from_the_store(web, tmp_path):
    """Two datasets of the same tar files, as training and validation, have their own indexes in the cache."""
    index(web, tmp_path / "set", "--val_split", "0.4", code=0)
    shutil.copytree(tmp_path / "set", web.root / "set")
    images = images_of(*(web.root / "tars").glob("*.tar"))
    for _ in range(2):
        names = ("dataset.json", "validation.json")
        train, val = (read_all(web.url(f"set/{name}"), tmp_path / "cache")[0] for name in names)
        assert train | val == images
        assert not set(train) & set(val)
    asked = [path for path in web.requests if "/kodak-" in path and path.endswith(".npy")]
    assert len(asked) == len(set(asked)) == 6


def test_broken_store_and_missing_tar_are_lines_of_their_own(web, tmp_path):
    web.answers["tars/kodak-000001.tar"] = [503]
    (web.root / "tars" / "kodak-000002.tar").unlink()
    done = index(web, tmp_path / "set", code=77)
    lines = [line for line in done.stdout.splitlines() if "broken  " in line]
    assert ["kodak-000001.tar" in lines[0], "kodak-000002.tar" in lines[1]] == [True, True]
    assert "404" in lines[1]
    web.answers.clear()
    index(web, tmp_path / "set", "--skip_broken_tars", code=0)
    assert len(read_all(tmp_path / "set" / "dataset.json", tmp_path / "cache")[0]) == 10
