"""Texts of users are read in the encodings and line ends of Windows, or are refused in one line."""

import json
import re
import shutil

import pytest

from tests.harness.preparing import shard, write_manifest
from vae.config.flags import read_json
from vae.config.trained_vae_flags import EvaluateConfig
from vae.data.exclude_list import read_exclude_list
from vae.data.manifest import read_rows
from vae.evaluation.image_set import find_images
from vae.shards.dataset_json import read_dataset
from vae.system.errors import UserError
from vae.system.files import sha256_of_file

ENCODINGS = {
    "utf-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: b"\xff\xfe" + text.encode("utf-16-le"),
}
every_encoding = pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)


@pytest.fixture
def photos(image_folder, tmp_path):
    """Four images with names of other languages."""
    (tmp_path / "in" / "été").mkdir(parents=True)
    names = ("a.png", "été/日本 1.png", "été/b c.png", "ü.png")
    for name, path in zip(names, sorted(image_folder.rglob("*.png")), strict=False):
        shutil.copy(path, tmp_path / "in" / name)
    return tmp_path / "in"


LISTS = ("été/日本 1.png\nü.png\n", "été\\日本 1.png  \r\nü.png\t\r\n\r\n", '"été\\日本 1.png"\r\n".\\ü.png"')


@pytest.mark.parametrize(("encode", "lines"), [*zip([str.encode, *ENCODINGS.values()], LISTS, strict=True)])
def test_lists(encode, lines, photos, tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(encode(lines))
    assert {"été/日本 1.png", "ü.png"} <= read_exclude_list(str(path)).names
    config = EvaluateConfig(vae=["x"], data_path=str(photos), output_dir="x", exclude=str(path), sizes=[32])
    found, _ = find_images(config)
    assert found.names == ["a.png", "été/b c.png"]
    shutil.copy(path, photos / "list.txt")
    shard(photos / "list.txt", tmp_path / "set", "--val_split", 0, code=0)
    assert read_dataset(tmp_path / "set" / "dataset.json").samples == 2


@every_encoding
def test_json_files_and_manifests(encode, photos, tmp_path):
    (tmp_path / "config.json").write_bytes(encode('{\r\n "data_path": "été"\r\n}'))
    assert read_json(tmp_path / "config.json") == {"data_path": ("été",)}
    write_manifest(tmp_path / "plain.jsonl", [{"path": "ü.png", "sha256": sha256_of_file(photos / "ü.png")}])
    text = (tmp_path / "plain.jsonl").read_text(encoding="utf-8").replace("\n", "\r\n")
    (tmp_path / "manifest.jsonl").write_bytes(encode(text))
    assert [row["path"] for row in read_rows(tmp_path / "manifest.jsonl")] == ["ü.png"]


@pytest.mark.parametrize("ends", [".csv", ".jsonl"])
def test_tables(ends, photos, tmp_path):
    table = 'name,score\r\nü.png,9\r\n"été/b c.png",9\r\na.png,1\r\n'
    if ends == ".jsonl":
        scores = {"ü.png": 9, "été/b c.png": 9, "a.png": 1}
        rows = [{"name": name, "score": score} for name, score in scores.items()]
        table = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / f"table{ends}").write_bytes(table.encode("utf-8-sig"))
    join = ("--join", tmp_path / f"table{ends}", "--join_on", "name")
    shard(photos, tmp_path / "set", *join, "--where", "score > 5", "--val_split", 0, code=0)
    assert read_dataset(tmp_path / "set" / "dataset.json").samples == 2


@pytest.mark.parametrize("data", ["été.png\n".encode("cp1252"), "a.png\r\n".encode("utf-16-le")])
def test_text_in_another_encoding_is_one_line(data, photos, tmp_path):
    (tmp_path / "list.txt").write_bytes(data)
    (tmp_path / "config.json").write_bytes(b'{"data_path": "' + data.strip() + b'"}')
    with pytest.raises(UserError, match="UTF-8") as caught:
        read_json(tmp_path / "config.json")
    assert "\n" not in str(caught.value)
    done = shard(photos, tmp_path / "set", "--exclude", tmp_path / "list.txt", code=78)
    assert re.search(r"--exclude .*list\.txt.*(UTF-8|none of its lines is an image)", done.stderr)
    assert "Traceback" not in done.stderr
