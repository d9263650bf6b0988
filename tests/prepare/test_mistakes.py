"""A user's mistake is one line that names the flag, with an exit code, and no file changes."""

import duckdb
import pytest

from tests.harness.image_kinds import detailed
from tests.harness.preparing import prepare

OUT = ("--output_dir", "out")
RAW = ("--input_dir", "raw")
QUARANTINE = ("--quarantine_dir", "aside")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folders with an image, without one, with a file of the user, and with a damaged image; a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("raw/sub", "empty", "foreign", "bad"):
        (tmp_path / name).mkdir(parents=True)
    detailed(0).save(tmp_path / "raw/sub/a.png")
    (tmp_path / "foreign/mine.jpg").write_bytes(b"an image of mine")
    (tmp_path / "bad/a.png").write_bytes(b"nothing")
    (tmp_path / "taken.txt").write_text("a file")
    duckdb.execute("COPY (SELECT 'http://x' AS url, 1 AS score) TO 'urls.parquet' (FORMAT parquet)")
    return tmp_path


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("mode", "flags", "code", "word"),
    [
        ("preprocess", [*RAW, "--output_dir", "raw"], 78, "--output_dir raw is --input_dir"),
        ("preprocess", ["--input_dir", "raw/sub", "--output_dir", "raw"], 78, "inside --output_dir raw"),
        ("preprocess", [*RAW, "--output_dir", "raw/sub/out"], 78, "inside --input_dir raw"),
        ("preprocess", ["--input_dir", "nothing", *OUT], 77, "--input_dir nothing does not exist"),
        ("preprocess", ["--input_dir", "empty", *OUT], 77, "contains no images"),
        ("preprocess", [*RAW, "--output_dir", "taken.txt"], 78, "taken.txt is a file"),
        ("preprocess", [*RAW, "--output_dir", "foreign"], 78, "--output_dir foreign contains files"),
        ("preprocess", [*RAW, *OUT, "--format", "png", "--quality", "90"], 2, "--quality 90"),
        ("preprocess", [*RAW], 2, "--output_dir"),
        ("validate", [*RAW, "--quarantine_dir", "raw/aside"], 78, "--quarantine_dir raw/aside"),
        ("validate", [*RAW, *QUARANTINE, "--limit", "1"], 2, "--limit"),
        ("validate", [*RAW, "--output_file", "no/such/report.json"], 78, "--output_file"),
        ("validate", ["--input_dir", "none.json", "--output_file", "no/report.json"], 78, "--output_file"),
        ("validate", [*RAW, "--background", "shiny"], 78, "--background shiny"),
        ("validate", [*RAW, "--max_aspect", "0.5"], 2, "--max_aspect 0.5"),
        ("analyze", ["--input_dir", "bad", *OUT], 77, "none of 1 images can be read, for example a.png"),
        ("analyze", [*RAW, "--output_dir", "bad"], 78, "did not write (a.png)"),
        ("shard", [*RAW, *OUT, "--val_split", "1"], 2, "--val_split 1.0"),
        ("shard", ["--input_dir", "urls.parquet", *OUT], 77, "and the table as --join"),
        ("split", [*RAW], 77, "contains no manifest.jsonl"),
        ("demo", [*RAW], 2, "unknown flag --input_dir"),
        ("demo", ["--num_workers", "many"], 78, "--num_workers many"),
        ("demo", ["--output_dir", "taken.txt"], 78, "--output_dir taken.txt"),
        ("paint", [], 2, "paint"),
        (None, [], 2, "--mode"),
    ],
)
def test_mistakes_are_one_line(folder, mode, flags, code, word):
    before = files_in(folder)
    done = prepare(*(["--mode", mode] if mode else []), *flags)
    assert done.returncode == code, done.stderr
    assert word in done.stderr
    assert len([line for line in done.stderr.splitlines() if "took" not in line]) == 1
    hidden = {folder / "out/.vae_folder.json", *(folder / "out/.prepare").rglob("*")}
    assert {path: data for path, data in files_in(folder).items() if path not in hidden} == before
