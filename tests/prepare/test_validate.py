"""Validation recognizes every kind of file, reports, and moves files only on request."""

import csv
import json
import re
import shutil
import sys

import pytest
from PIL import Image

from tests.harness.image_kinds import SKIPPED, detailed, encoded, write_all
from tests.harness.preparing import prepare
from tests.harness.runs import run_script
from vae.images.decoding import decode_image
from vae.images.formats import BadImageError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links, FIFOs and file names of Unix")
RULES = ("--max_pixels", "1000000", "--min_size", "16", "--max_aspect", "8", "--num_workers", "2")


def validate(folder, output, *flags, **expected):
    words = ("--input_dir", folder, "--output_file", output, "--overwrite", *flags)
    return prepare("--mode", "validate", *words, **expected)


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """All kinds, validated once: (folder, expected results, finished process, folder of the reports)."""
    root = tmp_path_factory.mktemp("kinds")
    expected = write_all(root / "raw")
    words = ("--mode", "validate", "--input_dir", str(root / "raw"))
    done = run_script("prepare_data.py", *words, "--output_file", str(root / "report.json"), *RULES)
    assert done.returncode == 0, done.stderr
    return root / "raw", expected, done, json.loads((root / "report.json").read_text())


def shown(name):
    """The name as one line of UTF-8: other bytes and line breaks are escaped."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def test_every_kind_has_its_reason_or_flag_in_the_report(validated):
    _, expected, done, report = validated
    reasons = {row["path"]: row["reason"] for row in report["rejected_files"] if row["detail"]}
    flags = {row["path"]: row["flags"] for row in report["flagged_files"]}
    copies = [row["path"] for row in report["duplicate_files"]]
    for name, (status, code) in expected.items():
        if status == "rejected":
            assert reasons.pop(shown(name)) == code
        elif status == "accepted" and code:
            assert code in flags[shown(name)]
    assert reasons == {}
    assert copies == ["twin_b.png"]
    assert copies == [name for name, (status, _) in expected.items() if status == "duplicate"]
    assert report["duplicate_files"][0]["detail"] == "of twin_a.png"
    assert report["files_checked"] == len(expected)
    assert sum(entry["count"] for entry in report["reasons"].values()) == report["rejected"]
    assert all(entry["remedy"] and entry["examples"] for entry in report["reasons"].values())
    assert {code: entry["count"] for code, entry in report["skipped"].items()} == SKIPPED
    lines = done.stdout.splitlines()
    assert f"{report['rejected']} rejected" in done.stdout
    assert lines[-1].startswith("  report: ")
    assert any(line.split()[:3] == ["rejected", "4", "truncated:"] for line in lines)
    assert "Traceback" not in done.stderr
    assert re.search(r"^validate: (\d+) of \1 images, \d+ bad, .*took ", done.stderr, re.M)
    assert "\r" not in done.stderr


def test_trainer_reads_exactly_the_accepted_files(validated):
    folder, expected, _, _ = validated
    user_rules = {"too_small", "aspect"}  # the reader does not apply them
    for name, (status, code) in expected.items():
        if status == "rejected" and code not in user_rules:
            with pytest.raises(BadImageError):
                decode_image(folder / name, max_pixels=1_000_000)
        else:
            assert decode_image(folder / name, max_pixels=1_000_000).shape[2] == 3


def test_first_frame_accepts_animations(validated, tmp_path):
    folder, *_ = validated
    (tmp_path / "films").mkdir()
    for name in ("film.gif", "film.webp", "film.png", "pages.tif"):
        shutil.copy(folder / name, tmp_path / "films")
    validate(tmp_path / "films", tmp_path / "r.json", "--first_frame", code=0)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["rejected"] == 0
    assert report["flags"]["first_frame"]["count"] == 4


@pytest.fixture
def mixed(tmp_path):
    """Two good images and two bad ones, one of each in a sub-folder."""
    folder = tmp_path / "raw"
    (folder / "sub").mkdir(parents=True)
    detailed(0).save(folder / "good.png")
    detailed(1).save(folder / "sub" / "good.jpg")
    (folder / "bad.png").write_bytes(b"")
    (folder / "sub" / "bad.jpg").write_bytes(encoded(detailed(2), "JPEG")[:-2])
    return folder


def files_below(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_quarantine_moves_rejected_files_and_lists_them(mixed, tmp_path):
    before = files_below(mixed)
    validate(mixed, tmp_path / "r.json", code=0)
    assert files_below(mixed) == before
    validate(mixed, tmp_path / "r.json", "--strict", "--quarantine_dir", str(tmp_path / "aside"), code=77)
    assert set(files_below(mixed)) == {"good.png", "sub/good.jpg"}
    aside = files_below(tmp_path / "aside")
    assert set(aside) == {"bad.png", "sub/bad.jpg", "quarantine.csv", ".vae_folder.json"}
    listed = csv.DictReader(aside["quarantine.csv"].decode().splitlines())
    assert {row["path"]: row["reason"] for row in listed} == {"bad.png": "empty", "sub/bad.jpg": "truncated"}
    (mixed / "bad.png").write_bytes(b"another file")  # with the path of a moved file
    again = ("--strict", "--quarantine_dir", str(tmp_path / "aside"))
    validate(mixed, tmp_path / "r.json", *again, code=77, says="exists")
    assert files_below(tmp_path / "aside") == aside
    assert (mixed / "bad.png").read_bytes() == b"another file"


def test_report_replaces_no_file_without_the_flag(mixed, tmp_path):
    (tmp_path / "r.json").write_text("mine")
    done = prepare("--mode", "validate", "--input_dir", mixed, "--output_file", tmp_path / "r.json")
    assert (done.returncode, (tmp_path / "r.json").read_text()) == (78, "mine")
    assert "--overwrite" in done.stderr


def test_files_are_compared_with_their_manifest(mixed, tmp_path):
    out = tmp_path / "out"
    flags = ("--output_dir", str(out), "--target_size", "32", "--format", "png")
    prepare("--mode", "preprocess", "--input_dir", mixed, *flags, code=0)
    done = validate(out, tmp_path / "r.json", "--strict", code=0)
    assert "skipped" not in done.stdout  # our own files beside the images are not counted
    (out / "good.png").unlink()
    Image.new("RGB", (32, 32), "red").save(out / "sub" / "good.png")
    validate(out, tmp_path / "r.json", "--strict", code=77)
    rejected = json.loads((tmp_path / "r.json").read_text())["rejected_files"]
    assert {row["path"]: row["reason"] for row in rejected} == {
        "good.png": "missing",
        "sub/good.png": "changed_since_manifest",
    }


def test_limit_uses_the_first_files_by_name(mixed, tmp_path):
    validate(mixed, tmp_path / "r.json", "--limit", "2", code=0)
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["files_found"], report["files_checked"]) == (4, 2)
    assert [row["path"] for row in report["rejected_files"]] == ["bad.png"]
