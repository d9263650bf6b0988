"""An image that ends a process costs itself alone; any number of parts gives the dataset of one command."""

import ctypes
import json
import subprocess
import sys

import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare, tree
from tests.harness.runs import ROOT, run_script
from tests.harness.tars import write_tar, write_webdataset
from vae.config.prepare_flags import ShardConfig
from vae.prepare import blocks, shard
from vae.prepare.blocks import file_blocks
from vae.prepare.check import Check
from vae.prepare.demo import draw_image
from vae.prepare.rows import RowFolder
from vae.prepare.source import open_source
from vae.prepare.table import Table
from vae.shards.dataset_json import read_dataset

IMAGES = {f"{number}.png": encoded(detailed(number), "PNG") for number in range(6)}


class Deadly(Check):
    """A check whose process crashes at two of the images."""

    def row(self, block, number, item):
        if item.name in ("1.png", "4.png"):
            ctypes.string_at(0)
        return super().row(block, number, item)


def checked(source, check, folder):
    """The table of a source after its check in two processes, and the number of blocks that are done."""
    with RowFolder(folder, "", {}).claimed() as rows:
        rows.run(source, check)
        return Table(rows, source), sum(map(rows.has, source.blocks))


@pytest.mark.slow
def test_image_that_ends_its_process_costs_itself_alone(tmp_path):
    path = write_tar(tmp_path / "a.tar", list(IMAGES.items()))
    config = ShardConfig(input_dir=str(path), output_dir="", num_workers="2")
    table, done = checked(open_source(config), Deadly(config), tmp_path / "rows")
    reasons = dict(table.all("SELECT name, reason FROM images ORDER BY n"))
    assert done == 1
    assert list(reasons) == list(IMAGES)
    assert {name for name, reason in reasons.items() if reason == "crashed"} == {"1.png", "4.png"}
    assert table.accepted == 4


# ---- Parts -------------------------------------------------------------------------------------------------

PARTS = (1, 4)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """60 images in folders, with look-alikes, a copy and a bad file."""
    folder = tmp_path_factory.mktemp("parts") / "raw"
    for number in range(50):
        path = folder / f"{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(detailed(number), "PNG"))
    for number in range(5):
        image = Image.fromarray(draw_image(96, 3, number))
        image.save(folder / f"drawn{number}.png")
        image.resize((64, 64)).save(folder / f"drawn{number} small.jpg", quality=60)
    (folder / "0/00.jpg").write_bytes(b"no image")
    (folder / "copy.png").write_bytes((folder / "0/00.png").read_bytes())
    return folder


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    monkeypatch.setattr(blocks, "SLICE", 4)
    monkeypatch.setattr(shard, "MEGABYTE", 50_000)


def run_parts(count, *words):
    """All parts from the last to the first, and the command that completes them."""
    for number in reversed(range(count)) if count > 1 else ():
        prepare(*words, "--part", f"{number}/{count}", code=0, says="the same command without --part")
    prepare(*words, code=0)


@pytest.mark.parametrize("mode", ["shard", "preprocess", "index"])
def test_parts_give_the_files_of_one_command(mode, raw, tmp_path):
    tars = write_webdataset(tmp_path / "tars", tars=5)
    flags = {
        "shard": ("--input_dir", raw, "--shard_mb", 1, "--val_split", 0.2),
        "preprocess": ("--input_dir", raw, "--target_size", 32, "--drop_duplicates"),
        "index": ("--input", tars, "--val_split", 0.2),
    }[mode]
    for count in PARTS:
        run_parts(count, "--mode", mode, "--output_dir", tmp_path / str(count), *flags)
    one = tree(tmp_path / "1")
    assert len(one) > 5
    assert tree(tmp_path / "4") == one


def test_parts_write_the_shards_when_all_images_are_checked(raw, tmp_path):
    words = ("--mode", "shard", "--input_dir", raw, "--output_dir", tmp_path / "set", "--shard_mb", 1)
    for number in (0, 1, 0):
        prepare(*words, "--part", f"{number}/2", code=0)
    tars = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("*.tar")}
    assert len(tars) > 3
    assert not (tmp_path / "set/dataset.json").exists()
    prepare(*words, code=0)
    assert {name: (tmp_path / "set" / name).stat().st_mtime_ns for name in tars} == tars


@pytest.mark.parametrize("mode", ["validate", "analyze"])
def test_reports_of_parts_are_those_of_one_command(mode, raw, tmp_path):
    found = []
    for count in PARTS:
        where = tmp_path / str(count)
        if mode == "validate":
            words = ("--rows_dir", where, "--output_file", tmp_path / f"{count}.json")
            run_parts(count, "--mode", mode, "--input_dir", raw, *words)
            report = json.loads((tmp_path / f"{count}.json").read_text())
            report.update(seconds=0, files_per_minute=0)
        else:
            run_parts(count, "--mode", mode, "--input_dir", raw, "--output_dir", where)
            report = json.loads((where / "stats.json").read_text())
        found.append(report)
    assert found[0] == found[1]


def test_part_of_other_settings_is_refused(raw, tmp_path):
    words = ("--mode", "shard", "--input_dir", raw, "--output_dir", tmp_path / "set")
    prepare(*words, "--part", "0/2", code=0)
    prepare(*words, "--part", "1/2", "--min_size", "16", code=78, says="min_size 1")


def test_new_file_changes_one_slice_only(tmp_path):
    names = [f"{number:05}.png" for number in range(2000)]

    def ids(some):
        return [block.id for block in file_blocks(str(tmp_path), some)]

    before, after = set(ids(names)), set(ids(sorted([*names, "00777b.png"])))
    assert len(before) > 300
    assert len(after - before) <= 2
    assert len(before - after) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="opens a locked file")
def test_second_command_in_a_folder_is_one_line(raw, tmp_path):
    words = ("--mode", "shard", "--input_dir", raw, "--output_dir", tmp_path / "set")
    prepare(*words, "--part", "0/2", code=0)
    lock = tmp_path / "set/.prepare/part-0-of-2.lock"
    code = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
    code += "print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        prepare(*words, "--part", "0/2", code=78, says="another command is working in it")
        prepare(*words, "--part", "1/2", code=0)
        other.communicate()


@pytest.mark.parametrize("mode", ["shard", "preprocess", "index", "analyze", "demo"])
def test_folder_of_another_command_or_with_files_is_not_written_to(mode, raw, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.txt").write_text("mine")
    prepare("--mode", "demo", "--output_dir", tmp_path / "demo", "--count", "1", "--target_size", "32")
    prepare("--mode", "shard", "--input_dir", raw, "--output_dir", tmp_path / "set", code=0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    source = {"index": ("--input", write_webdataset(tmp_path / "tars", tars=1)), "demo": ()}
    for name in ("mine", "set" if mode == "demo" else "demo"):
        words = (*source.get(mode, ("--input_dir", raw)), "--output_dir", tmp_path / name)
        prepare("--mode", mode, *words, code=78, says="--output_dir")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ray on Windows is not tested")
def test_dataset_checked_on_ray_is_that_of_one_command(tmp_path):
    pytest.importorskip("ray.data", reason="ray[data] is not installed")
    (tmp_path / "raw").mkdir()
    for number in range(30):
        (tmp_path / "raw" / f"{number:02}.png").write_bytes(encoded(detailed(number), "PNG"))
    (tmp_path / "raw/bad.png").write_bytes(b"no image")
    words = ("--input_dir", str(tmp_path / "raw"), "--num_workers", "1", "--output_dir")
    done = run_script(str(ROOT / "examples/prepare_on_ray.py"), *words, str(tmp_path / "ray"))
    assert done.returncode == 0, done.stderr
    assert "1 blocks are checked, 1 images rejected" in done.stdout
    rows = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray/.prepare/rows").iterdir()}
    for name in ("ray", "here"):
        prepare("--mode", "shard", *words, tmp_path / name, code=0)
    assert {path: path.stat().st_mtime_ns for path in rows} == rows
    versions = {read_dataset(tmp_path / name / "dataset.json").version for name in ("ray", "here")}
    assert len(versions) == 1
