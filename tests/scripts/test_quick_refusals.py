"""Mistakes that can be found without PyTorch are reported before it is imported, which takes seconds."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.harness.blocked_imports import each_without_pytorch, without_libraries
from tests.harness.runs import ROOT
from vae.interop.vae_path import WEIGHTS_NAME
from vae.system.script import SETUP, activation_hint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One image, a VAE file without content, folders without images, and earlier outputs in `used`."""
    tmp_path = tmp_path_factory.mktemp("refusals")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "data" / "a.png")
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "manifest.jsonl").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "b.heic").touch()
    (tmp_path / "used").mkdir()
    for name in ("a.png", "report.html", "metrics.jsonl", WEIGHTS_NAME):
        (tmp_path / "used" / name).touch()
    return tmp_path


OUTPUT = {"--output_dir": "F/out"}
TRAIN = {"--data_path": "F/data", **OUTPUT}
VAE = {"--vae": "F/a.safetensors"}
INFER = {**VAE, "--mode": "reconstruct", "--input": "F/data/a.png", "--output_dir": "F/out"}
EVALUATE = {**VAE, "--data_path": "F/data", "--output_dir": "F/out"}
EXPORT = {**VAE, "--output": "F/out"}
VALIDATE = {"--mode": "validate", "--input_dir": "F/data"}
ANALYZE = {"--mode": "analyze", "--input_dir": "F/data", "--output_dir": "F/caf\udce9"}

# script, its flags, changed flags, exit code, words of the line; F is the folder
MANIFEST = ["--data_path F/manifest.jsonl is a manifest", "validation.json", "--mode shard"]
CANNOT = ["/proc/a", "cannot be written", "/proc: ", "use another folder"]
REFUSALS = [
    ("train_vae.py", TRAIN, {"--profile": "standrd"}, 78, ["--profile standrd", "standard"]),
    ("train_vae.py", TRAIN, {"--profile": "decoder"}, 78, ["--profile decoder", "--init_from"]),
    ("train_vae.py", TRAIN, {"--progressive": "32:x"}, 78, ["--progressive 32:x", "SIZE:EPOCHS:BATCH"]),
    ("train_vae.py", TRAIN, {"--image_size": "33"}, 78, ["--image_size 33", "32 or 40"]),
    ("train_vae.py", TRAIN, {"--background": "whit"}, 78, ["--background whit", "#808080"]),
    ("train_vae.py", TRAIN, {"--output_dir": "F/used"}, 78, ["F/used", "(a.png)", "empty folder"]),
    ("train_vae.py", TRAIN, {"--output_dir": "F/a.safetensors"}, 78, ["F/a.safetensors", "another folder"]),
    ("train_vae.py", TRAIN, {"--output_dir": "F/data/out"}, 78, ["--output_dir F/data/out", "outside"]),
    ("train_vae.py", TRAIN, {"--output_dir": "F/caf\udce9"}, 78, ["F/caf\\udce9 is not valid UTF-8", "name"]),
    ("prepare_data.py", ANALYZE, {}, 78, ["F/caf\\udce9 is not valid UTF-8, so DuckDB", "another name"]),
    ("train_vae.py", TRAIN, {"--data_path": "F/dta"}, 77, ["--data_path F/dta", "does not exist"]),
    ("train_vae.py", TRAIN, {"--data_path": "F/empty"}, 77, ["--data_path F/empty", "jpg", "another folder"]),
    ("train_vae.py", TRAIN, {"--data_path": "F/phone"}, 77, ["F/phone", "1 file", "b.heic", "pillow-heif"]),
    ("train_vae.py", TRAIN, {"--val_path": "F/empty"}, 77, ["--val_path F/empty", "another folder"]),
    ("train_vae.py", TRAIN, {"--sample_images": "F/none"}, 77, ["--sample_images F/none", "does not exist"]),
    ("train_vae.py", TRAIN, {"--init_from": "F/none.pt"}, 78, ["--init_from F/none.pt"]),
    ("train_vae.py", TRAIN, {"--resume_from": "F/none.pt"}, 78, ["--resume_from F/none.pt", ".pt", "latest"]),
    ("train_vae.py", OUTPUT, {"--resume_from": "latest"}, 78, ["no checkpoint in --output_dir F/out"]),
    ("infer_vae.py", INFER, {"--mode": "improve"}, 2, ["--mode", "'improve'", "reconstruct"]),
    ("infer_vae.py", INFER, {"--vae": "F/none"}, 78, ["--vae F/none"]),
    ("infer_vae.py", INFER, {"--output_dir": "F/used"}, 78, ["--output_dir F/used", "empty folder"]),
    ("infer_vae.py", INFER, {"--input": "F/none.png"}, 77, ["--input F/none.png does not exist"]),
    ("infer_vae.py", INFER, {"--input": "F/phone"}, 77, ["--input F/phone", "b.heic", "pillow-heif"]),
    ("infer_vae.py", INFER, {"--input": "s3://me:pw@b/a"}, 77, ["--input s3://b/a", "a folder"]),
    ("evaluate_vae.py", EVALUATE, {"--data_path": "F/manifest.jsonl"}, 77, MANIFEST),
    ("export_vae.py", EXPORT, {"--data_path": "s3://me:pw@b/a"}, 77, ["--data_path s3://b/a", "folder"]),
    ("export_vae.py", EXPORT, {"--data_path": "F/empty"}, 77, ["--data_path F/empty", "another folder"]),
    ("export_vae.py", EXPORT, {"--output": "F/used"}, 78, ["--output F/used", "--overwrite"]),
    ("check_compatibility.py", {}, {"--plan": "--gpu=RTX 6090"}, 78, ["--gpu 'RTX 6090'", "--vram_gib"]),
]
if sys.platform == "linux":  # nobody can write into /proc, not even root
    REFUSALS += [
        ("train_vae.py", TRAIN, {"--output_dir": "/proc/a"}, 78, CANNOT),
        ("infer_vae.py", INFER, {"--output_dir": "/proc/a"}, 78, CANNOT),
        ("evaluate_vae.py", EVALUATE, {"--output_dir": "/proc/a"}, 78, CANNOT),
        ("export_vae.py", EXPORT, {"--output": "/proc/a"}, 78, CANNOT),
        ("prepare_data.py", VALIDATE, {"--output_file": "/proc/a"}, 78, CANNOT),
        ("prepare_data.py", VALIDATE, {"--rows_dir": "/proc/a"}, 78, CANNOT),
    ]


@pytest.fixture(scope="module")
def answers(folder) -> list[tuple[int, str]]:
    """The exit code and stderr of each refusal; starting Python for each one would take seconds."""
    commands = []
    for script, flags, changed, *_expected in REFUSALS:
        given = [word for pair in {**flags, **changed}.items() for word in pair]
        commands.append([script, *(word.replace("F/", f"{folder}/") for word in given)])
    return each_without_pytorch(commands)


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[f"{case[0]} {case[2]}" for case in REFUSALS])
def test_mistake_is_reported_without_pytorch(folder, answers, number):
    (found, error), (*_command, code, words) = answers[number], REFUSALS[number]
    assert found == code, error
    assert len(error.splitlines()) == 1, error
    for word in words:
        assert word.replace("F/", f"{folder}/") in error
    assert not (folder / "out").exists()


VALID = {"train_vae.py": TRAIN, "infer_vae.py": INFER, "evaluate_vae.py": EVALUATE, "export_vae.py": EXPORT}


def test_valid_command_gets_as_far_as_pytorch(folder):
    commands = [
        [script, *(word.replace("F/", f"{folder}/") for pair in flags.items() for word in pair)]
        for script, flags in VALID.items()
    ]
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
    for word in ("--vae", "required", "examples:"):
        assert word in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 110
