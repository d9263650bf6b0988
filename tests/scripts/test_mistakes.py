"""A user's mistake is one line with the flag, and an exit code; it creates and changes no file.

The wording is free. Mistakes that need no PyTorch are found before it is imported, which takes seconds.
"""

import shutil
import sys
from pathlib import Path

import duckdb
import pytest
import torch
from PIL import Image

import train_vae
from tests.harness.blocked_imports import each_without_pytorch, without_libraries
from tests.harness.preparing import without_workers
from tests.harness.runs import ROOT, TINY, run_here
from tests.harness.small_vae import write_vae
from tests.harness.vae_families import SMALL, diffusers_model, research_model, save_research
from vae.config.flags import command_words
from vae.interop.vae_path import WEIGHTS_NAME
from vae.system.script import SETUP, activation_hint

JSON_FILES = {
    "unknown": '{"image_siz": 32}',
    "nested": '{"config": "other.json"}',
    "list": "[1, 2]",
    "torn": "{",
    "twice": '{"seed": 1, "seed": 2}',
    "image": "\xff\xd8",
}


@pytest.fixture(scope="module")
def folder(image_folder, tmp_path_factory) -> Path:
    """Images, VAEs with and without content, a run, and folders that are empty, damaged or of others."""
    root = tmp_path_factory.mktemp("mistakes")
    for name in ("data/sub", "empty", "phone", "zips", "used", "bad", "foreign", "file.safetensors"):
        (root / name).mkdir(parents=True)
    for name in ("data/a.png", "data/sub/b.png"):
        Image.new("RGB", (16, 16)).save(root / name)
    (root / "bad/a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (root / "foreign/mine.jpg").write_bytes(b"an image of mine")
    files = [f"used/{name}" for name in ("a.png", "report.html", "metrics.jsonl", WEIGHTS_NAME)]
    for name in (*files, "phone/b.heic", "zips/a.zip", "a.safetensors", "manifest.jsonl", "taken.txt"):
        (root / name).touch()
    for name, text in JSON_FILES.items():
        (root / f"{name}.json").write_text(text, encoding="latin-1")
    write_vae(root / "vae")
    diffusers_model("flux", *SMALL).save_pretrained(root / "other")
    save_research(root / "whole.safetensors", research_model("sd", *SMALL))
    duckdb.execute(f"COPY (SELECT 'http://x' AS url) TO '{root / 'urls.parquet'}' (FORMAT parquet)")
    disc = {
        "adversarial_weight": 0.5,
        "disc_start": 0.5,
        "disc_warmup": 0,
        "disc_channels": 8,
        "disc_layers": 1,
    }
    run = {**TINY, **disc, "data_path": str(image_folder), "output_dir": str(root / "run"), "num_epochs": 1}
    assert train_vae.main(command_words(run)) == 0
    return root


# The flags of a valid command, which those of a mistake override; F is the folder.
VALID = {
    "train_vae.py": "--data_path F/data --output_dir F/out",
    "infer_vae.py": "--vae F/a.safetensors --mode reconstruct --input F/data/a.png --output_dir F/out",
    "evaluate_vae.py": "--vae F/a.safetensors --data_path F/data --output_dir F/out",
    "export_vae.py": "--vae F/a.safetensors --output F/out",
}

# Script, exit code, and flags, the first of which the line names.
WITHOUT_PYTORCH = [
    ("train_vae.py", 2, "--image_siz 3"),
    ("train_vae.py", 2, "--image"),  # an abbreviation could change its meaning later
    ("train_vae.py", 2, "photos"),
    ("train_vae.py", 2, "--channels 32,64,64"),
    ("train_vae.py", 2, "--device gpu"),
    ("train_vae.py", 78, "--learning_rate -1"),
    ("train_vae.py", 78, "--learning_rate inf"),
    ("train_vae.py", 78, "--val_split 0.95"),
    ("train_vae.py", 78, "--num_workers many"),
    ("train_vae.py", 78, "--output_dir="),
    ("train_vae.py", 78, "--image_size 500 --channels 8 16 16 16"),
    ("train_vae.py", 78, "--reconstruction_weight 0 --perceptual_weight 0"),
    ("train_vae.py", 78, "--profile standrd"),
    ("train_vae.py", 78, "--init_from F/none.pt --profile decoder"),
    ("train_vae.py", 78, "--progressive 32:x"),
    ("train_vae.py", 78, "--progressive 32:0:2"),
    ("train_vae.py", 78, "--background whit"),
    ("train_vae.py", 78, "--crop_scale 0.5 --crop resized"),
    ("train_vae.py", 78, "--crop_scale 0.5 1.0"),  # of --crop resized
    ("train_vae.py", 78, "--crop_ratio 2 1 --crop resized"),
    ("train_vae.py", 78, "--color_jitter 0.2"),
    ("train_vae.py", 78, "--color_jitter 0 0 0 0.6"),
    *(("train_vae.py", 78, f"--config F/{name}.json") for name in (*JSON_FILES, "none")),
    ("train_vae.py", 78, "--config F"),
    ("train_vae.py", 78, "--output_dir F/used"),
    ("train_vae.py", 78, "--output_dir F/a.safetensors"),
    ("train_vae.py", 78, "--output_dir F/data/out"),
    ("train_vae.py", 78, "--output_dir F/caf\udce9"),
    ("train_vae.py", 78, "--resume_from F/none.pt"),
    ("train_vae.py", 77, "--data_path F/dta"),
    ("train_vae.py", 77, "--data_path F/empty"),
    ("train_vae.py", 77, "--data_path F/phone"),
    ("train_vae.py", 77, "--data_path F/taken.txt"),
    ("train_vae.py", 77, "--val_path F/empty"),
    ("train_vae.py", 77, "--sample_images F/none"),
    ("infer_vae.py", 2, "--mode improve"),
    ("infer_vae.py", 78, "--vae F/none"),
    ("infer_vae.py", 78, "--output_dir F/used"),
    ("infer_vae.py", 78, "--output_dir F/taken.txt"),
    ("infer_vae.py", 78, "--steps 1 --mode interpolate"),
    ("infer_vae.py", 78, "--count 3"),
    ("infer_vae.py", 77, "--input F/none.png"),
    ("infer_vae.py", 77, "--input F/phone"),
    ("infer_vae.py", 77, "--input s3://me:pw@b/a"),
    ("infer_vae.py", 77, "--input F/empty"),
    ("infer_vae.py", 77, "--input F/empty --mode decode"),
    ("evaluate_vae.py", 77, "--data_path F/manifest.jsonl"),
    ("export_vae.py", 77, "--data_path s3://me:pw@b/a"),
    ("export_vae.py", 77, "--data_path F/empty"),
    ("export_vae.py", 78, "--output F/used"),
    ("check_compatibility.py", 78, "--gpu=RTX_6090 --plan"),
    ("prepare_data.py", 78, "--output_dir F/caf\udce9 --mode analyze --input_dir F/data"),
]
if sys.platform == "linux":  # nobody can write into /proc, not even root
    WITHOUT_PYTORCH += [
        ("train_vae.py", 78, "--output_dir /proc/a"),
        ("infer_vae.py", 78, "--output_dir /proc/a"),
        ("evaluate_vae.py", 78, "--output_dir /proc/a"),
        ("export_vae.py", 78, "--output /proc/a"),
        ("prepare_data.py", 78, "--output_file /proc/a --mode validate --input_dir F/data"),
        ("prepare_data.py", 78, "--rows_dir /proc/a --mode validate --input_dir F/data"),
    ]

RESUME = "--data_path IMAGES --output_dir F/run --resume_from F/run/checkpoint_epoch_1.pt"
IN_AND_OUT = "--input_dir F/data --output_dir F/out"
WITH_PYTORCH = [
    ("train_vae.py", 78, "--channels 6 16 --norm_groups 4 --data_path IMAGES"),
    ("train_vae.py", 78, "--early_stopping 3 --val_split 0 --data_path IMAGES"),
    ("train_vae.py", 78, "--disc_layers 9 --adversarial_weight 1 --data_path IMAGES"),
    ("train_vae.py", 77, "--batch_size 13 --data_path IMAGES"),
    ("train_vae.py", 77, "--batch_size 4 --data_path IMAGES --accumulation_steps 4"),
    ("train_vae.py", 77, "--batch_size 4 --data_path IMAGES --progressive 32:1:2,16:1:100"),
    ("train_vae.py", 78, "--perceptual_weights /nothing.pth --perceptual_weight 1 --data_path IMAGES"),
    ("train_vae.py", 78, f"--channels 8 32 {RESUME}"),
    ("train_vae.py", 78, f"--z_channels 8 {RESUME}"),
    ("train_vae.py", 78, f"--disc_channels 16 {RESUME}"),
    ("train_vae.py", 78, f"--init_from /nothing {RESUME}"),
    ("train_vae.py", 78, f"--progressive 16:5:2 {RESUME}"),
    ("evaluate_vae.py", 78, "--vae F/vae gone"),
    ("evaluate_vae.py", 78, "--vae F/*.pt"),
    ("evaluate_vae.py", 78, "--vae F/vae F/vae"),
    ("evaluate_vae.py", 78, "--promote F/foreign --vae F/vae --data_path IMAGES --sizes 32"),
    ("evaluate_vae.py", 77, "--data_path F/set.json --vae F/vae"),
    ("evaluate_vae.py", 78, "--sizes -8 --vae F/vae"),
    ("evaluate_vae.py", 77, "--data_path IMAGES --vae F/vae --sizes 64"),
    ("evaluate_vae.py", 78, "--batch_size 2 --vae F/vae --sizes 0"),
    ("evaluate_vae.py", 78, "--perceptual_weights w.pth --vae F/vae --perceptual_net none"),
    ("evaluate_vae.py", 78, "--inception_weights w.pth --vae F/vae"),
    ("export_vae.py", 78, "--vae F/whole.safetensors"),  # without a scaling
    ("export_vae.py", 78, "--vae F/vae F/other"),  # of other shapes
    ("export_vae.py", 78, "--vae F/vae F/vae --average_by score"),
    ("export_vae.py", 78, "--output F/taken.txt/out --vae F/vae"),
    ("export_vae.py", 78, "--output F/taken.txt --vae F/vae"),
    ("export_vae.py", 78, "--output F/file.safetensors --vae F/vae"),  # which is a folder
    ("export_vae.py", 77, "--data_path F/bad --vae F/vae"),
    ("export_vae.py", 78, "--image_size 33 --vae F/vae --data_path F/bad"),
    ("prepare_data.py", 78, "--output_dir F/data --mode preprocess --input_dir F/data"),
    ("prepare_data.py", 78, "--output_dir F/data --mode preprocess --input_dir F/data/sub"),
    ("prepare_data.py", 78, "--output_dir F/data/out --mode preprocess --input_dir F/data"),
    ("prepare_data.py", 77, "--input_dir F/none --mode preprocess --output_dir F/out"),
    ("prepare_data.py", 77, "--input_dir F/empty --mode preprocess --output_dir F/out"),
    ("prepare_data.py", 78, "--output_dir F/taken.txt --mode preprocess --input_dir F/data"),
    ("prepare_data.py", 78, "--output_dir F/foreign --mode preprocess --input_dir F/data"),
    ("prepare_data.py", 2, f"--quality 90 --mode preprocess --format png {IN_AND_OUT}"),
    ("prepare_data.py", 2, "--output_dir --mode preprocess --input_dir F/data"),
    ("prepare_data.py", 78, "--quarantine_dir F/data/aside --mode validate --input_dir F/data"),
    ("prepare_data.py", 2, "--limit 1 --mode validate --input_dir F/data --quarantine_dir F/aside"),
    ("prepare_data.py", 78, "--output_file F/no/report.json --mode validate --input_dir F/data"),
    ("prepare_data.py", 78, "--background shiny --mode validate --input_dir F/data"),
    ("prepare_data.py", 2, "--max_aspect 0.5 --mode validate --input_dir F/data"),
    ("prepare_data.py", 77, "--input_dir F/bad --mode analyze --output_dir F/out"),
    ("prepare_data.py", 78, "--output_dir F/bad --mode analyze --input_dir F/data"),
    ("prepare_data.py", 2, f"--val_split 1 --mode shard {IN_AND_OUT}"),
    ("prepare_data.py", 77, "--input_dir F/urls.parquet --mode shard --output_dir F/out"),
    ("prepare_data.py", 77, "--input_dir F/zips --mode shard --output_dir F/out"),
    ("prepare_data.py", 77, "--input_dir F/data --mode split"),
    ("prepare_data.py", 2, "--input_dir F/data --mode demo"),
    ("prepare_data.py", 2, "--num_workers many --mode demo"),
    ("prepare_data.py", 2, "--mode paint"),
    ("prepare_data.py", 2, "--mode"),
]
if not torch.cuda.is_available():
    WITH_PYTORCH += [
        ("train_vae.py", 78, "--device cuda --data_path IMAGES"),
        ("evaluate_vae.py", 78, "--device cuda --vae F/vae --data_path IMAGES"),
    ]


def words_of(script: str, flags: str, folder: Path, images: Path | None = None) -> list[str]:
    words = f"{VALID.get(script, '')} {flags}".split()
    return [word.replace("F/", f"{folder}/").replace("IMAGES", str(images)) for word in words]


def assert_one_line(flags: str, code: int, found: int, error: str) -> None:
    lines = [line for line in error.splitlines() if "took" not in line]  # progress
    assert (found, len(lines)) == (code, 1), error
    assert flags.split()[0].partition("=")[0] in lines[0]


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_of(cases: list) -> list[str]:
    return [f"{script} {flags}" for script, _, flags in cases]


@pytest.fixture(scope="module")
def answers(folder) -> list[tuple[int, str]]:
    """The exit code and stderr of each command; starting Python for each one would take seconds."""
    return each_without_pytorch(
        [[script, *words_of(script, flags, folder)] for script, _, flags in WITHOUT_PYTORCH]
    )


@pytest.mark.parametrize("number", range(len(WITHOUT_PYTORCH)), ids=names_of(WITHOUT_PYTORCH))
def test_a_mistake_is_found_without_pytorch(folder, answers, number):
    _, code, flags = WITHOUT_PYTORCH[number]
    assert_one_line(flags, code, *answers[number])
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("script", "code", "flags"), WITH_PYTORCH, ids=names_of(WITH_PYTORCH))
def test_a_mistake_changes_no_file(folder, image_folder, tmp_path, monkeypatch, script, code, flags):
    monkeypatch.chdir(tmp_path)
    before = files_in(folder)
    words = words_of(script, flags, folder, image_folder)
    if script == "train_vae.py" and RESUME not in flags:
        words = [*command_words({**TINY, "max_steps": 1}), *words]
    with without_workers():
        done = run_here(script, *words)
    assert_one_line(flags, code, done.returncode, done.stderr)
    assert not list((folder / "out").glob("[!.]*"))
    shutil.rmtree(folder / "out", ignore_errors=True)  # it has only what the same command continues from
    assert files_in(folder) == before
    assert list(tmp_path.iterdir()) == []


def test_a_valid_command_gets_as_far_as_pytorch(folder):
    commands = [[script, *words_of(script, "", folder)] for script in VALID]
    for script, (code, error) in zip(VALID, each_without_pytorch(commands), strict=True):
        line = f"{script}: torch is not installed: run {SETUP}{activation_hint(ROOT)}\n"
        assert (code, error) == (1, line)
    found = without_libraries(*commands[0])
    assert (found.returncode, found.stderr.count("\n")) == (1, 1)
    assert f"is not installed: run {SETUP}" in found.stderr


@pytest.mark.parametrize("script", ["evaluate_vae.py", "export_vae.py", "infer_vae.py"])
def test_help_needs_no_library(script):
    found = without_libraries(script, "--help")
    assert found.returncode == 0, found.stderr
    assert "--vae" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 110
