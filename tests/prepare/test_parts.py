"""--part I/N is a slice of the list of blocks: any number of parts gives the dataset of one command."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare, tree
from tests.harness.runs import ROOT
from tests.harness.tars import write_webdataset
from vae.prepare import blocks, shard
from vae.prepare.blocks import file_blocks
from vae.prepare.demo import draw_image

PARTS = (1, 4, 13)


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
    assert tree(tmp_path / "4") == tree(tmp_path / "13") == one


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
    assert found[0] == found[1] == found[2]


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
        words = source.get(mode, ("--input_dir", raw))
        prepare(
            "--mode",
            mode,
            *words,
            "--output_dir",
            tmp_path / name,
            code=78,
            says=f"--output_dir {tmp_path / name}",
        )
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
