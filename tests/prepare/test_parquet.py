"""Parquet files as Hugging Face `datasets` and img2dataset write them: trained on, byte for byte."""

import json
from hashlib import sha256

import duckdb
import pytest

from tests.harness.http_store import http_store, hurry
from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import shard
from tests.harness.runs import TINY, run_here
from tests.harness.s3_store import s3_bucket
from vae.prepare.database import connect
from vae.prepare.parquet_source import _unreadable
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.training.run import train


def picture(number):
    return encoded(detailed(number), ("PNG", "JPEG")[number % 2])


def write_datasets(folder, files=2, rows=12):
    """As `datasets` writes a split: image {bytes, path}, label, text."""
    folder.mkdir(parents=True)
    db = duckdb.connect()
    db.execute(
        "CREATE TABLE t (image STRUCT(bytes BLOB, path VARCHAR), label BIGINT, text VARCHAR, score FLOAT)"
    )
    for number in range(files * rows):
        values = [picture(number), f"{number}.jpg", number % 3, f"text {number}", number / 10]
        db.execute("INSERT INTO t VALUES ({'bytes': ?::BLOB, 'path': ?}, ?, ?, ?)", values)
    for file in range(files):
        path = folder / f"train-{file:05}-of-{files:05}.parquet"
        part = f"SELECT * FROM t LIMIT {rows} OFFSET {file * rows}"
        db.execute(f"COPY ({part}) TO '{path}' (FORMAT parquet)")
    return folder


def images_of(path):
    images = ShardImages([read_dataset(path)], 1)
    return [(images.read(number), images.metadata(number)) for number in range(len(images))]


def test_images_have_their_bytes_and_columns_and_are_filtered_split_trained_and_evaluated(tmp_path):
    folder = write_datasets(tmp_path / "data")
    shard(folder, tmp_path / "set", "--where", "label <> 1 and score < 2", "--val_split", "0.2", code=0)
    found = [one for name in ("dataset", "validation") for one in images_of(tmp_path / f"set/{name}.json")]
    numbers = [number for number in range(24) if number % 3 != 1 and number < 20]
    assert sorted(data for data, _ in found) == sorted(map(picture, numbers))
    for data, metadata in found:
        number = int(metadata["path"].removesuffix(".jpg"))
        assert data == picture(number)
        assert (metadata["label"], metadata["text"]) == (number % 3, f"text {number}")
        assert metadata["key"] == sha256(data).hexdigest()[:32]
    given = {**TINY, "data_path": str(tmp_path / "set/dataset.json"), "output_dir": str(tmp_path / "run")}
    del given["val_split"]
    train({**given, "num_epochs": 1})
    words = ("--vae", tmp_path / "run/vae", "--data_path", tmp_path / "set/validation.json", "--sizes", 32)
    done = run_here("evaluate_vae.py", *words, "--device", "cpu", "--output_dir", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results/results.json").read_text())
    assert results["protocol"]["images"] == read_dataset(tmp_path / "set/validation.json").samples


def test_column_of_bytes_as_img2dataset_writes_it(tmp_path):
    db = duckdb.connect()
    db.execute("CREATE TABLE t (key VARCHAR, jpg BLOB, caption VARCHAR, other BLOB)")
    for number in range(3):
        db.execute("INSERT INTO t VALUES (?, ?, ?, NULL)", [f"{number:09}", picture(number), "a text"])
    db.execute("INSERT INTO t VALUES ('failed', NULL, NULL, NULL)")
    db.execute(f"COPY t TO '{tmp_path / '00000.parquet'}' (FORMAT parquet)")
    shard(tmp_path / "00000.parquet", tmp_path / "set", code=78, says="--image_column jpg")
    words = ("--image_column", "jpg", "--val_split", "0")
    shard(tmp_path / "00000.parquet", tmp_path / "set", *words, code=0, says="rejected       1  empty")
    found = images_of(tmp_path / "set/dataset.json")
    assert [data for data, _ in found] == [picture(number) for number in range(3)]
    assert found[2][1]["of_source"] == "000000002"


@pytest.mark.parametrize(
    "image",
    ["{'path': p, 'bytes': b}", "{'bytes': b}", "[{'bytes': b, 'path': p}]", "[b]", "{'Bytes': b, 'n': 1}"],
)
def test_images_by_the_names_of_fields_and_every_other_column_is_metadata(tmp_path, image):
    """pandas and Polars write the fields of a struct in any order, and columns of any type."""
    db = duckdb.connect()
    db.execute("CREATE TABLE t (i INT, p VARCHAR, b BLOB)")
    db.executemany("INSERT INTO t VALUES (?, ?, ?)", [[i, f"{i}.png", picture(i)] for i in range(4)])
    columns = (
        "DATE '2020-01-01' + i AS taken, TIMESTAMPTZ '2020-01-01 02:00:00+02' AS zoned, "
        "(i / 4)::DECIMAL(9, 2) AS cost, ['a', 'b'] AS tags, 'cat'::ENUM('cat') AS kind, "
        "NULL::DATE AS none, 'nan'::DOUBLE AS nan"
    )
    db.execute(f"COPY (SELECT {image} AS \"the image\", {columns} FROM t) TO '{tmp_path / 'a.parquet'}'")
    where = "taken > '2020-01-01' and cost < 0.7"
    shard(tmp_path / "a.parquet", tmp_path / "set", "--where", where, "--val_split", "0", code=0)
    found = images_of(tmp_path / "set/dataset.json")
    assert [data for data, _ in found] == [picture(1), picture(2)]
    expected = {"taken": "2020-01-02", "zoned": "2020-01-01 00:00:00+00", "cost": 0.25, "tags": ["a", "b"]}
    assert found[0][1].items() >= {**expected, "kind": "cat"}.items()
    assert not {"none", "nan"} & found[0][1].keys()
    assert connect().execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]


def test_list_of_several_images_is_rejected_and_no_query_of_ours_is_damage(tmp_path):
    db = duckdb.connect()
    db.execute("CREATE TABLE t (b BLOB[])")
    db.executemany("INSERT INTO t VALUES (?)", [[[picture(0)]], [[picture(1), picture(2)]], [[]], [None]])
    db.execute(f"COPY t TO '{tmp_path / 'a.parquet'}' (FORMAT parquet)")
    done = shard(tmp_path / "a.parquet", tmp_path / "set", "--val_split", "0", code=0)
    assert "1  several_images" in done.stdout
    assert "2  empty" in done.stdout
    assert str(_unreadable(tmp_path, duckdb.InvalidInputException("a"))).count("copy it again") == 1
    assert "copy it again" not in str(_unreadable(tmp_path, duckdb.OutOfMemoryException("a")))


def test_file_without_rows_is_one_line_and_limit_counts_files(tmp_path):
    folder = write_datasets(tmp_path / "data", rows=2)
    shard(folder, tmp_path / "set", "--limit", 1, "--val_split", "0", code=0, says="2 images for training")
    duckdb.execute(f"COPY (SELECT ''::BLOB AS image LIMIT 0) TO '{tmp_path / 'a.parquet'}'")
    shard(tmp_path / "a.parquet", tmp_path / "none", code=77, says="a.parquet has no rows")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(200) + b"PAR1"])
def test_what_is_no_parquet_file_is_one_line(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    done = shard(tmp_path / "a.parquet", tmp_path / "set", code=77, says="--input_dir")
    assert len(done.stderr.strip().splitlines()) == 1


def test_files_on_a_web_server_give_the_same_images(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")
    hurry(monkeypatch)
    write_datasets(tmp_path / "web/data")
    with http_store(tmp_path / "web") as web:
        pattern = web.url("data/train-{00000..00001}-of-00002.parquet")
        shard(pattern, tmp_path / "there", "--val_split", "0.2", code=0)
    shard(tmp_path / "web/data", tmp_path / "here", "--val_split", "0.2", code=0)
    versions = [read_dataset(tmp_path / name / "dataset.json").version for name in ("here", "there")]
    assert versions[0] == versions[1]


@pytest.mark.slow
def test_photos_and_parquet_files_in_a_bucket_need_no_mount(tmp_path, monkeypatch):
    write_datasets(tmp_path / "data")
    (tmp_path / "photos/sub").mkdir(parents=True)
    for number in range(6):
        (tmp_path / "photos" / ("sub" * (number % 2)) / f"{number}.png").write_bytes(picture(number * 2))
    with s3_bucket(monkeypatch) as bucket:
        for name in ("data", "photos"):
            bucket.put(str(tmp_path / name), f"bucket/{name}", recursive=True)
        bucket.pipe("bucket/photos/more.tar", b"")
        for name in ("data", "photos"):
            done = shard(f"s3://bucket/{name}/", tmp_path / f"{name}-there", "--val_split", "0.2", code=0)
            assert ("archive: more.tar" in done.stdout) == (name == "photos")
            shard(tmp_path / name, tmp_path / f"{name}-here", "--val_split", "0.2", code=0)
            sets = [read_dataset(tmp_path / f"{name}-{place}/dataset.json") for place in ("there", "here")]
            assert sets[0].version == sets[1].version
