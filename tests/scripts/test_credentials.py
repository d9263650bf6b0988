"""Passwords and signatures in addresses are used, and neither printed nor recorded, by every script."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.harness.http_store import http_store, hurry
from tests.harness.runs import run_here
from tests.harness.shards import pack
from tests.harness.small_vae import write_vae
from tests.harness.stub_trainer import start_search, write_stub
from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import UserError

PASSWORD, SIGNATURE = "pa55word", "5ecret"
ADDRESS = "http://bob:pa55word@127.0.0.1:9/dataset.json?sig=5ecret"  # nobody listens
SMALL = ("--max_images", "2", "--perceptual_net", "none", "--device", "cpu")
CHECK = "check_compatibility.py"  # computes for seconds
FLAGS_OF = {
    "train_vae.py": ("--data_path", "--output_dir", "out"),
    "prepare_data.py": ("--input_dir", "--mode", "validate"),
    "evaluate_vae.py": ("--data_path", "--output_dir", "out", "--vae", "vae", "--device", "cpu"),
    "infer_vae.py": ("--input", "--mode", "reconstruct", "--output_dir", "out", "--vae", "vae"),
    "export_vae.py": ("--data_path", "--output", "out", "--vae", "vae"),
    CHECK: ("--data_path",),
}


def assert_public(folder: Path, *printed: str) -> None:
    """Neither the printed texts nor the files have a password or a signature."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pt"]
    texts = [*printed, *(path.read_bytes().decode("utf-8", "replace") for path in files)]
    found = [text for text in texts if PASSWORD in text or SIGNATURE in text]
    assert not found


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--x=http://u:p@h:80/a@b?q=1#f", "--x=http://h:80/a@b"),
        (" https:/u:p@h/x", " https:/h/x"),
        ("zip://a::http://u:p/w?#1@h/x", "zip://a::http://h/x"),
        ("http://token@h", "http://h"),
        ("http://h/x?a='b'&sig=1", "http://h/x"),
        ("http://u:p w@[::1]:80/x", "http://[::1]:80/x"),
        ("see 'http://h/x?a=1' and http://u:p@g: no answer", "see 'http://h/x' and http://g: no answer"),
        ("http://h:80: no answer to a@b", "http://h:80: no answer to a@b"),
        ("C:/Users/a@b?", "C:/Users/a@b?"),
        ("s3://bucket/a@2x/dataset.json", "s3://bucket/a@2x/dataset.json"),
    ],
)
def test_addresses_within_any_text_lose_their_credentials(given, shown, capsys):
    assert public_text(given) == str(UserError(given)) == shown
    for write in (console.info, console.error, console.progress):
        write(given)
    assert "".join(capsys.readouterr()) == f"{shown}\n" * 3


@pytest.mark.parametrize("text", ["http://", "y", "a://b", "http://u:p w", "http://a?"])
def test_long_texts_are_searched_in_linear_time(text):
    started = time.process_time()
    public_text(text * (200_000 // len(text)))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("script", "flag", "words"),
    [
        ("train_vae.py", "output_dir", []),
        ("train_vae.py", "save_config", []),
        ("train_vae.py", "cache_dir", []),
        ("prepare_data.py", "output_dir", ["--mode", "demo"]),
        ("prepare_data.py", "quarantine_dir", ["--mode", "validate", "--input_dir", "."]),
        ("evaluate_vae.py", "output_dir", ["--vae", "vae", "--data_path", "."]),
        ("infer_vae.py", "output_dir", ["--vae", "vae", "--mode", "encode", "--input", "a.png"]),
        ("export_vae.py", "output", ["--vae", "vae"]),
        ("tune_vae.py", "output_dir", []),
    ],
)
def test_results_are_not_written_to_a_folder_named_like_an_address(
    script, flag, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = run_here(script, *words, f"--{flag}=s3://bob:pa55word@b/x?5ecret")
    assert done.returncode in (2, 78)
    assert f"--{flag} " in done.stderr
    assert "is an address: give a path on this machine" in done.stderr
    assert_public(tmp_path, done.stdout, done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [*list(FLAGS_OF)[:-1], pytest.param(CHECK, marks=pytest.mark.slow)])
def test_mistakes_name_addresses_without_credentials(script, tmp_path, monkeypatch):
    hurry(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_vae(tmp_path / "vae")
    flag, *words = FLAGS_OF[script]
    done = run_here(script, *words, f"{flag}={ADDRESS}")
    assert done.returncode not in (0, 2) or script == CHECK
    assert_public(tmp_path, done.stdout, done.stderr)


def test_evaluation_records_no_credentials(image_folder, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")
    hurry(monkeypatch)
    root = pack(image_folder, tmp_path / "set").parent
    monkeypatch.chdir(tmp_path)
    write_vae(tmp_path / "vae")
    words = ["--vae", "vae", "--output_dir", "out", "--sizes", "32", *SMALL, "--cache_dir", "cache"]
    with http_store(root) as web:
        words += ["--data_path", web.url("dataset.json?sig=5ecret", login="bob:pa55word@")]
        monkeypatch.setattr(sys, "argv", ["evaluate_vae.py", *words])
        done = run_here("evaluate_vae.py", *words)
        assert done.returncode == 0, done.stderr
        assert_public(tmp_path, done.stdout, done.stderr)
    assert "http://127.0.0.1" in (tmp_path / "out" / "results.json").read_text()


@pytest.mark.slow
def test_search_gives_credentials_to_its_runs_and_records_none(image_folder, tmp_path):
    pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")
    pytest.importorskip("optuna", reason="requirements-tune.txt is not installed")
    root = pack(image_folder, tmp_path / "set", val_split=0.1).parent
    stub = write_stub(tmp_path / "stub")
    (tmp_path / "space.json").write_text(json.dumps({"learning_rate": [1e-4, 1e-3]}))
    options = {"perceptual_weight": 0.0, "image_size": 32, "z_channels": 4}
    with http_store(root) as web:
        options["data_path"] = web.url("dataset.json?sig=5ecret", login="bob:pa55word@")
        (tmp_path / "base.json").write_text(json.dumps(options))
        words = ["--config", tmp_path / "base.json", "--space", tmp_path / "space.json", "--trials", "2"]
        search = start_search(stub, *map(str, [*words, "--output_dir", tmp_path / "out"]))
        printed, _ = search.communicate(timeout=120)
    assert search.returncode == 0, printed
    for given in (tmp_path / "out").rglob("options.json"):  # what the stub got
        assert PASSWORD in given.read_text()
        given.unlink()
    assert_public(tmp_path / "out", printed)
    assert "http://127.0.0.1" in (tmp_path / "out" / "best.json").read_text()
