"""Which images a dataset has: look-alikes in one subset, conditions, lists, other datasets, joined tables."""

import json
from hashlib import sha256
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.harness.image_kinds import encoded
from tests.harness.preparing import prepare, shard
from tests.harness.tars import write_img2dataset
from vae.prepare.blocks import FileBlock
from vae.prepare.demo import draw_image
from vae.prepare.output_folders import write_error
from vae.prepare.rows import BlockRows, RowFolder
from vae.prepare.source import Source
from vae.prepare.table import Table, choose_validation
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages

PHOTOS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Drawn images, each with a mirrored copy and a compressed one."""
    folder = tmp_path_factory.mktemp("groups") / "raw"
    folder.mkdir()
    for number in range(PHOTOS):
        image = Image.fromarray(draw_image(96, 5, number))
        (folder / f"{number:02}_a.png").write_bytes(encoded(image, "PNG"))
        (folder / f"{number:02}_b.png").write_bytes(encoded(ImageOps.mirror(image), "PNG"))
        (folder / f"{number:02}_c.jpg").write_bytes(encoded(image, "JPEG", quality=50))
    return folder


def names_in(source, dataset):
    """The names of the images of a dataset."""
    names = {sha256(path.read_bytes()).hexdigest()[:32]: path.name for path in source.glob("*_*")}
    images = ShardImages([read_dataset(dataset)], 1)
    return [names[images.key(number)] for number in range(len(images))]


def test_copies_of_a_validation_image_do_not_train(source, tmp_path):
    shard(source, tmp_path / "set", "--val_split", "0.25", code=0)
    parts = [names_in(source, tmp_path / "set" / name) for name in ("dataset.json", "validation.json")]
    photos = [{name[:2] for name in part} for part in parts]
    assert sum(map(len, parts)) == 3 * PHOTOS
    assert not photos[0] & photos[1]
    assert 0.1 < len(parts[1]) / (3 * PHOTOS) < 0.5


def test_manifest_that_separates_copies_is_refused_unless_it_is_allowed(source, tmp_path):
    rows = [
        {"path": path.name, "sha256": "", "split": "val" if path.name == "03_b.png" else "train"}
        for path in sorted(source.glob("*_*"))
    ]
    manifest = source / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        refused = shard(source, tmp_path / "set", code=78, says="03_a.png, 03_b.png, 03_c.jpg")
        assert "--group_by near_duplicates" in refused.stderr
        assert not list((tmp_path / "set").glob("*.tar"))
        shard(source, tmp_path / "set", "--no-near_duplicates", code=0)
        assert names_in(source, tmp_path / "set/validation.json") == ["03_b.png"]
    finally:
        manifest.unlink()


def chosen(tmp_path, hashes, groups, share):
    """Which of accepted images with these hashes, and groups or None, validate."""
    block = FileBlock(id="one", file=tmp_path, names=tuple(map(str, range(len(hashes)))))
    rows = [
        {"number": n, "name": str(n), "sha256": f"{value:016x}{n:048x}", "bytes": 1, "width": 1, "height": 1,
         "format": "PNG"}
        for n, value in enumerate(hashes)
    ]  # fmt: skip
    with RowFolder(tmp_path, "", {}).claimed() as folder:
        lines = folder.scratch / "rows.jsonl"
        lines.write_text("\n".join(map(json.dumps, [*rows, {"number": -1, "name": ""}])))
        folder.save(block, BlockRows(lines, 0, False))
        table = Table(folder, Source("", [block], "image"))
        with table.arrays("given", n=np.arange(len(hashes)), grp=np.array(groups, object)):
            table.run("UPDATE images SET grp = given.grp FROM given WHERE given.n = images.n")
        choose_validation(table, share, near=False)
        return np.array([subset == "val" for (subset,) in table.all("SELECT subset FROM images ORDER BY n")])


def test_groups_are_whole_and_large_ones_train(tmp_path):
    hashes = np.random.default_rng(1).integers(2**64, size=2000, dtype=np.uint64)
    groups = ["large"] * 600 + [f"pair {number // 2}" for number in range(1400)]
    held = chosen(tmp_path, hashes, groups, 0.2)
    assert not held[:600].any()
    assert (held[600::2] == held[601::2]).all()
    assert 0.1 < held.mean() < 0.25
    assert not chosen(tmp_path, hashes, ["one"] * 2000, 0.2).any()  # one group cannot be divided
    two = chosen(tmp_path, hashes[:5], ["a", "a", "a", "b", "b"], 0.2)  # all are larger than the share
    assert two.tolist() == [False, False, False, True, True]


def test_list_of_images_to_leave_out(source, tmp_path):
    digest = sha256((source / "00_a.png").read_bytes()).hexdigest()
    key = sha256((source / "01_a.png").read_bytes()).hexdigest()[:32].upper()
    (tmp_path / "list.txt").write_text(f"{digest}\n{key}\n\n02_c.jpg\nunknown\n")
    done = shard(source, tmp_path / "set", "--exclude", tmp_path / "list.txt", "--val_split", "0")
    assert "left out       3  excluded" in done.stdout
    left = set(names_in(source, tmp_path / "set/dataset.json"))
    assert {path.name for path in source.iterdir()} - left == {"00_a.png", "01_a.png", "02_c.jpg"}
    (tmp_path / "empty.txt").write_text("\n")
    for name in ("empty.txt", "none.txt"):
        shard(source, tmp_path / "other", "--exclude", tmp_path / name, code=78, says="--exclude")


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_columns_of_another_table_are_joined_by_key_or_url(tmp_path, suffix):
    """As LAION publishes scores beside the tar files that img2dataset wrote."""
    tars = write_img2dataset(tmp_path / "tars", tars=1)
    scores = tmp_path / f"scores.{suffix}"
    kind = {"jsonl": "json"}.get(suffix, suffix)
    values = (
        "SELECT lpad(i::VARCHAR, 9, '0') AS key, i / 10.0 AS score, 'it''s' AS \"a b\", 2 AS \"c\\\" "
        "FROM range(10) r(i)"
    )
    duckdb.execute(f"COPY ({values}) TO '{scores}' (FORMAT {kind})")
    where = 'score >= 0.5 and "a b" like \'it%\' and "c\\" = 2 and punsafe < 0.9'
    rules = ("--join", scores, "--where", where)
    for mode, source in (("index", "--input"), ("shard", "--input_dir")):
        words = (source, tars, "--output_dir", tmp_path / mode, "--val_split", "0", *rules)
        prepare("--mode", mode, *words, code=0)
        images = ShardImages([read_dataset(tmp_path / mode / "dataset.json")], 1)
        assert [images.metadata(n)["punsafe"] for n in range(len(images))] == [0.5, 0.6, 0.7, 0.8]
    assert images.metadata(0)["score"] == 0.5
    words = ("--input", tars, "--output_dir", tmp_path / "none", "--join", scores, "--join_on", "nothing")
    prepare("--mode", "index", *words, code=78, says="--join_on nothing")


def test_rows_of_a_joined_table_that_belong_to_no_image_are_counted(tmp_path):
    """A spreadsheet removes leading zeros; a column has N/A after 20480 rows of numbers."""
    tars = write_img2dataset(tmp_path / "tars", tars=1)
    table = tmp_path / "table.csv"
    words = ("--mode", "index", "--input", tars, "--output_dir", tmp_path / "set", "--join", table)
    table.write_text("key;score\n" + "".join(f"{i};{i}\n" for i in range(10)))
    done = prepare(*words, code=78, says="no row belongs to one of the")
    assert 'for example "0" in a row, and "00000000' in done.stderr
    table.write_text("key,score\n" + "".join(f"{i:09},{i}\n" for i in range(1, 30000)) + "x,N/A\n")
    prepare(*words, "--where", "score > 3", code=78, says="try_cast(x AS DOUBLE)")
    done = prepare(*words, "--where", "try_cast(score AS DOUBLE) > 3", code=0)
    assert "has no row for 1 of" in done.stdout
    table.write_bytes("key,score\n1,Müller\n".encode("latin-1"))
    prepare(*words, code=77, says="write it as UTF-8")


def test_joined_values_are_json_of_every_reader_and_an_empty_cell_changes_nothing(source, tmp_path):
    tables = {
        "a.csv": "name,id,score\n./00_a.png,1,nan\n01_a.png,2,0.5\n01_a.png,2,0.7\n02_a.png,3,inf\n",
        "b.csv": "name,score,text\n00_a.png,,x\n01_a.png,,y\n",
        "c.csv": "id,more\n9,1\n",
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    words = (source, tmp_path / "set", "--val_split", "0", "--join_on", "name", "--join")
    done = shard(*words, tmp_path / "a.csv", tmp_path / "b.csv", code=0, says="1 rows repeat a name")
    assert "has no row for 33 of 36 images" in done.stdout
    images = ShardImages([read_dataset(tmp_path / "set/dataset.json")], 1)
    by_name = {row["source"]: row for row in map(images.metadata, range(len(images)))}
    assert (by_name["00_a.png"]["text"], by_name["01_a.png"]["score"]) == ("x", 0.5)
    assert not {"score", "text"} & by_name["02_a.png"].keys()
    assert "score" not in by_name["00_a.png"]
    shard(*words, tmp_path / "a.csv", tmp_path / "c.csv", code=78, says="none of its values of id")


@pytest.mark.parametrize("text", ["", "width >", "missing = 1", "width > 1); DROP TABLE images; SELECT (1"])
def test_what_is_no_condition_is_one_line(source, tmp_path, text):
    done = shard(source, tmp_path / "set", f"--where={text}", "--limit", "3")
    assert done.returncode in (2, 78), done.stdout
    assert "--where" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "set").glob("*.tar"))


def test_identity_of_a_dataset_does_not_depend_on_how_python_prints_a_name():
    row = ("\U0001fae8.png", 1, None)  # a character that Python 3.10 escapes in a repr, and 3.12 does not
    found = Table.digest(SimpleNamespace(stream=lambda _query: iter([row])), {}, "")
    assert found == sha256(b'{}["\\ud83e\\udee8.png", 1, null]\n').hexdigest()


@pytest.mark.parametrize(
    ("reason", "word"),
    [("There is not enough space on the disk.\r\n", "the disk is full"), ("Access is denied.\r\n", "denied")],
)
def test_errors_of_duckdb_on_windows_are_one_line(reason, word):
    found = str(write_error(duckdb.IOException(f'IO Error: Could not write file "t": {reason}'), "out"))
    assert (word in found, "\n" in found) == (True, False)
