"""--part I/N and --mode merge: the bytes of one command, in any order, and after a part was killed."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare, write_manifest
from tests.harness.runs import ROOT
from tests.harness.waiting import wait_until
from vae.prepare.demo.draw import draw_image
from vae.prepare.fingerprints import FILE_NAME
from vae.prepare.ledger import Ledger
from vae.prepare.parts import Part
from vae.system.errors import EXIT_DATA

PARTS = 4
SHARD = ("--mode", "shard", "--shard_mb", "1", "--val_split", "0.1")
PREPROCESS = ("--mode", "preprocess", "--target_size", "32", "48", "--format", "png", "--drop_duplicates")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images, duplicates, damaged files and names that collide, and the results of one command."""
    root = tmp_path_factory.mktemp("parts")
    (root / "raw" / "sub").mkdir(parents=True)
    for number in range(22):
        image = detailed(seed=number, height=400, width=400)
        data = encoded(image, "BMP")
        (root / "raw" / "sub" / f"{number:02}.bmp").write_bytes(data)
        if number % 6 == 0:
            (root / "raw" / f"copy{number}.bmp").write_bytes(data)
            (root / "raw" / f"cut{number}.bmp").write_bytes(data[:5000])
            (root / "raw" / f"cut_again{number}.bmp").write_bytes(data[:5000])
            (root / "raw" / f"copy{number}.JPG").write_bytes(encoded(image, "JPEG"))
    for mode, flags in {"shard": SHARD, "preprocess": PREPROCESS}.items():
        done = run(root, mode, flags)
        assert done.returncode == 0, done.stderr
    assert num_shards(root / "shard") >= 13
    return root


def num_shards(folder):
    return len(list(folder.glob("*.tar")))


def run(root, output, flags, *more):
    words = ("--input_dir", root / "raw", "--output_dir", root / output)
    return prepare(*flags, *words, "--num_workers", "1", *more)


def run_parts(root, output, flags, order):
    for number in order:
        done = run(root, output, flags, "--part", f"{number}/{PARTS}")
        assert done.returncode == 0, done.stderr


def merge(root, output):
    return prepare("--mode", "merge", "--output_dir", root / output)


def contents(folder):
    """All files below a folder but its ledger."""
    files = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {path: data for path, data in files.items() if "ledger" not in path.name}


def test_every_file_is_in_one_part_and_colliding_names_are_in_the_same():
    parts = [Part(number, PARTS) for number in range(PARTS)]
    names = [f"folder/{number}.png" for number in range(400)]
    counts = [sum(part.has(name) for name in names) for part in parts]
    assert sum(counts) == 400
    assert min(counts) > 60
    assert all(
        [part.has("a/X.png") for part in parts] == [part.has("a/x.jpg") for part in parts] for _ in "1"
    )


def test_shards_of_four_parts_are_those_of_one_command(root):
    run_parts(root, "shard_parts", SHARD, (2, 0, 3))
    done = merge(root, "shard_parts")
    assert done.returncode == EXIT_DATA
    assert f"1 parts are not complete (1/{PARTS})" in done.stderr
    run_parts(root, "shard_parts", SHARD, (1,))
    planned = merge(root, "shard_parts")
    assert f"{num_shards(root / 'shard')} shards are planned" in planned.stdout
    assert not (root / "shard_parts" / "dataset.json").exists()
    run_parts(root, "shard_parts", SHARD, (3, 1))
    assert "shards are planned" in merge(root, "shard_parts").stdout
    run_parts(root, "shard_parts", SHARD, (0, 1, 2, 3))
    done = merge(root, "shard_parts")
    assert done.returncode == 0, done.stderr
    assert contents(root / "shard_parts") == contents(root / "shard")


def test_images_of_four_parts_are_those_of_one_command(root):
    run_parts(root, "preprocess_parts", PREPROCESS, (3, 2, 1, 0))
    done = merge(root, "preprocess_parts")
    assert done.returncode == 0, done.stderr
    assert "0 converted now" in done.stdout
    assert "near duplicates:" not in done.stderr  # no image is read again: the parts have found fingerprints
    assert contents(root / "preprocess_parts") == contents(root / "preprocess")


def test_killed_part_continues(root):
    """Killed while it checks, and again while it writes."""
    words = [*SHARD, "--input_dir", root / "raw", "--output_dir", root / "killed", "--num_workers", "1"]
    command = [sys.executable, "prepare_data.py", *map(str, words), "--part", "0/1"]
    ledger = root / "killed" / ".prepare" / "parts" / "00000-of-00001.sqlite-wal"
    process = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: ledger.exists() and ledger.stat().st_size > 100_000, process)
    process.kill()
    process.wait()
    assert merge(root, "killed").returncode == EXIT_DATA
    assert run(root, "killed", SHARD, "--part", "0/1").returncode == 0
    assert f"{num_shards(root / 'shard')} shards are planned" in merge(root, "killed").stdout
    process = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: any((root / "killed" / ".prepare").glob("*.tar.json")), process)
    process.kill()
    process.wait()
    before = {path: os.stat(path).st_mtime_ns for path in (root / "killed" / ".prepare").glob("*.tar.json")}
    assert 0 < len(before) < num_shards(root / "shard")
    (root / "killed" / ".prepare" / ".x.tar.json.node.1.tmp").touch()  # what a kill within a write leaves
    assert run(root, "killed", SHARD, "--part", "0/1").returncode == 0
    assert merge(root, "killed").returncode == 0
    assert {path: os.stat(path).st_mtime_ns for path in before} == before
    assert contents(root / "killed") == contents(root / "shard")


def test_parts_of_different_commands_are_refused(root):
    run(root, "mixed", SHARD, "--part", "0/2")
    done = run(root, "mixed", SHARD, "--part", "0/3")
    assert "--part 0/3" in done.stderr
    assert "parts of 2" in done.stderr
    run(root, "mixed", SHARD, "--part", "1/2", "--min_size", "8")
    assert "different flags" in merge(root, "mixed").stderr


# ---- reports ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looking_alike(root):
    """Near duplicates, exact copies, damaged files and a manifest that differs; and the reports on them."""
    folder = root / "alike"
    folder.mkdir()
    for number in range(9):
        image = Image.fromarray(draw_image(160, 5, number))
        image.save(folder / f"{number}.png")
        image.crop((0, 0, 128, 128)).save(folder / f"part{number}.png")
        image.resize((300, 300)).save(folder / f"large{number}.jpg")
        if number % 3 == 0:
            (folder / f"copy{number}.png").write_bytes((folder / f"{number}.png").read_bytes())
            (folder / f"cut{number}.png").write_bytes((folder / f"{number}.png").read_bytes()[:500])
    (folder / "note.txt").write_text("no image")
    rows = [{"path": "1.png", "sha256": "0" * 64}, {"path": "gone.png", "sha256": "0" * 64}]
    write_manifest(folder / "manifest.jsonl", rows)
    for mode in ("validate", "analyze"):
        done = report(root, mode, "one")
        assert done.returncode == 0, done.stderr
        assert {path.suffix for path in (root / mode).iterdir()} <= {".json", ".csv", ".html"}
    os.replace(folder / FILE_NAME, root / "hashes.csv")
    return folder


def report(root, mode, name, *more):
    (root / mode).mkdir(exist_ok=True)
    output = ("--output_file", root / mode / f"{name}.json")
    return prepare("--mode", mode, "--input_dir", root / "alike", *output, "--num_workers", "1", *more)


def report_contents(root, mode, name):
    """The files of a report, without times, rates and free disk space."""
    changing = rb'"(seconds|files_per_minute|free_bytes)": [\d.]+|<b>[^<]*</b><span>free on that disk'
    files = (root / mode).glob(f"{name}*.*")
    return {path.name.removeprefix(name): re.sub(changing, b"", path.read_bytes()) for path in files}


@pytest.mark.parametrize("mode", ["analyze", "validate"])
@pytest.mark.parametrize("count", [1, 4, 13])
def test_report_of_parts_is_that_of_one_command(root, looking_alike, mode, count):
    name = f"of{count}"
    for number in reversed(range(count)):
        done = report(root, mode, name, "--part", f"{number}/{count}")
        assert done.returncode == 0, done.stderr
    done = prepare("--mode", "merge", "--output_file", root / mode / f"{name}.json")
    assert done.returncode == 0, done.stderr
    found = report_contents(root, mode, name)
    assert found == report_contents(root, mode, "one")
    assert len(found) == {"analyze": 3, "validate": 2}[mode]
    if mode == "analyze":
        os.replace(looking_alike / FILE_NAME, root / f"{count}.csv")
        assert (root / f"{count}.csv").read_bytes() == (root / "hashes.csv").read_bytes()
        near = json.loads((root / mode / "one.json").read_text())["near_duplicates"]
        assert near["clusters"] == 9
        assert near["images"] == 9 * 3 + 3


@pytest.mark.parametrize("mode", ["analyze", "validate"])
def test_killed_part_of_a_report_continues(root, looking_alike, mode):
    (root / mode).mkdir(exist_ok=True)
    output = root / mode / "killed.json"
    words = ["--mode", mode, "--input_dir", root / "alike", "--output_file", output, "--num_workers", "1"]
    command = [sys.executable, "prepare_data.py", *map(str, words), "--part", "0/1"]
    path = Path(f"{output}.parts", "00000-of-00001.sqlite")
    journal = Path(f"{path}-wal")
    process = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: journal.exists() and journal.stat().st_size > 150_000, process)
    process.kill()
    process.wait()
    done = prepare("--mode", "merge", "--output_file", output)
    assert done.returncode == EXIT_DATA
    assert "1 parts are not complete (0/1)" in done.stderr
    with closing(Ledger(path)) as ledger:
        results = list(ledger.results())
        assert 0 < len(results) < 33
        marked = results[0]._replace(detail="of the killed run")
        ledger.record(marked)
    done = report(root, mode, "killed", "--part", "0/1")
    assert done.returncode == 0, done.stderr
    with closing(Ledger(path)) as ledger:
        assert ledger.result(marked.name) == marked  # it was not checked again
        ledger.record(results[0])
    assert prepare("--mode", "merge", "--output_file", output).returncode == 0
    assert report_contents(root, mode, "killed") == report_contents(root, mode, "one")
    (looking_alike / FILE_NAME).unlink(missing_ok=True)


@pytest.mark.parametrize("part", ["4/4", "x/4", "1", "-1/4", "1/0"])
def test_part_that_is_none_is_refused(root, part):
    done = run(root, "none", SHARD, f"--part={part}")
    assert f"--part {part} is no part" in done.stderr
