"""A dataset on a web server trains as a folder does; a store that fails ends a saved run; no secret stays."""

import pytest

from tests.harness.http_store import http_store, hurry
from tests.harness.s3_store import s3_bucket
from tests.harness.sharded_runs import record_samples, samples_of_steps
from tests.harness.shards import pack, write_shards
from tests.harness.training_runs import assert_same, last_checkpoint, records
from vae.shards.dataset_json import read_dataset
from vae.system.errors import DataError, UserError
from vae.training.run import train

pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")


@pytest.fixture(scope="module")
def root(image_folder, tmp_path_factory):
    """14 training and 2 validation images."""
    return pack(image_folder, tmp_path_factory.mktemp("remote") / "set", val_split=0.1).parent


@pytest.fixture
def web(root, monkeypatch):
    hurry(monkeypatch)
    with http_store(root) as server:
        yield server


@pytest.fixture
def given(tiny, tmp_path):
    values = {**tiny, "batch_size": 4, "num_epochs": 2, "log_freq": 1, "cache_dir": str(tmp_path / "cache")}
    del values["val_split"]
    return values


@pytest.mark.slow
def test_remote_run_is_the_local_one_and_keeps_no_secret(given, web, root, tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    url = web.url("dataset.json?signature=5ecret", login="me:pa55word@")
    in_place = {key: value for key, value in given.items() if key != "cache_dir"}
    assert train({**in_place, "data_path": str(root / "dataset.json"), "output_dir": str(here)}) == 0
    assert "cache   none, shards are read in place" in capsys.readouterr().out
    assert train({**given, "data_path": url, "output_dir": str(there)}) == 0
    one, other = last_checkpoint(here), last_checkpoint(there)
    for key in ("model", "ema", "position"):
        assert_same(one[key], other[key], key)
    assert other["config"]["data_path"] == [web.url()]
    assert sorted(web.wholes()) == ["images-000000.tar", "validation-000000.tar"]
    measured = records(there, "data")
    assert measured[-1]["cache_hit_rate"] == 1  # the only shard is there since the first batch
    assert not any("cache_hit_rate" in record for record in records(here, "data"))
    files = [path for path in (*there.rglob("*"), *(tmp_path / "cache").rglob("*")) if path.is_file()]
    printed = capsys.readouterr()
    assert f"cache   at most 50 GiB of shards in {tmp_path / 'cache'}" in printed.out
    kept = [*(path.read_bytes() for path in files), *(text.encode() for text in printed)]
    assert not any(secret in content for content in kept for secret in (b"5ecret", b"pa55word"))


@pytest.mark.slow
def test_samples_from_a_bucket_are_those_of_the_folder(given, tmp_path, monkeypatch):
    """The cache has no room for all shards."""
    hurry(monkeypatch)
    path = write_shards(tmp_path / "many", 75, 30_000)
    given |= {"data_streams": 4, "shuffle_shards": 4, "num_workers": "1", "num_epochs": 1}
    given["cache_gib"] = 13.0 * int(max(read_dataset(path).shards.bytes)) / 2**30

    def run(name, data_path):
        with record_samples(tmp_path / f"{name}.jsonl"):
            assert train({**given, "data_path": data_path, "output_dir": str(tmp_path / name)}) == 0
        return samples_of_steps(tmp_path / f"{name}.jsonl", path), last_checkpoint(tmp_path / name)["model"]

    here = run("here", str(path))
    with s3_bucket(monkeypatch) as bucket:
        bucket.put(str(path.parent), "bucket/many", recursive=True)
        there = run("there", "s3://bucket/many/dataset.json")
    assert there[0] == here[0]
    assert_same(there[1], here[1], "model")
    assert max(record["remote_mib_per_second"] for record in records(tmp_path / "there", "data")) > 0
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(file.stat().st_size for file in files) <= given["cache_gib"] * 2**30


@pytest.mark.slow
def test_store_that_fails_ends_a_run_that_is_saved_and_resumes(given, tmp_path, monkeypatch):
    hurry(monkeypatch)
    path = write_shards(tmp_path / "many", 48, 20_000)
    given |= {
        "data_streams": 1,
        "shuffle_shards": 2,
        "num_workers": "1",
        "num_epochs": 1,
        "perceptual_weight": 0,
    }
    with http_store(path.parent) as web:
        given |= {"data_path": web.url(), "cache_dir": str(tmp_path / "whole_cache")}
        whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
        assert train({**given, "output_dir": whole}) == 0
        last = web.wholes()[-1]
        web.answers[last] = [500]
        given["cache_dir"] = str(tmp_path / "cache")
        with pytest.raises(DataError) as caught:
            train({**given, "output_dir": parts})
        assert "\n" not in str(caught.value)
        assert f"{web.url(last)}: the server answers 500, 3 times" in str(caught.value)
        assert "saved" in str(caught.value)
        assert "resume with" in str(caught.value)
        assert 0 < last_checkpoint(tmp_path / "parts")["position"]["step"] < 12
        web.answers.clear()
        assert train({**given, "output_dir": parts, "resume_from": "latest"}) == 0
    one, other = (last_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    for key in ("model", "ema", "position"):
        assert_same(one[key], other[key], key)


@pytest.mark.slow
def test_cache_that_is_too_small_is_an_error_before_anything_is_written(given, web, tmp_path):
    with pytest.raises(UserError, match=r"--cache_gib 1e-05.*: use --cache_gib 1"):
        train({**given, "data_path": web.url(), "cache_gib": 1.0001e-5})
    assert not (tmp_path / "run").exists()
    assert web.wholes() == []


def test_short_run_downloads_the_shards_of_its_windows_only(given, tmp_path, monkeypatch):
    """The export measures images of all shards: it downloads none of them."""
    hurry(monkeypatch)
    path = write_shards(tmp_path / "many", 48, 20_000)
    shards = read_dataset(path).shards
    with http_store(path.parent) as web:
        options = {"data_path": web.url(), "data_streams": 1, "shuffle_shards": 4, "max_steps": 1}
        assert train({**given, **options, "output_dir": str(tmp_path / "out")}) == 0
        assert len(set(web.wholes())) <= 2 * (4 + 1) < len(shards)
