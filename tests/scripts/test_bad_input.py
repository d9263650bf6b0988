"""A user's mistake prints one line with flag, value and remedy, sets the exit code and creates no files."""

import shutil
from pathlib import Path

import pytest
import torch

import train_vae
from tests.harness.runs import TINY
from vae.config.flags import command_words
from vae.system.script import exit_code

USAGE, DATA, CONFIG = 2, 77, 78


@pytest.fixture
def mistake(tiny, tmp_path, capsys):
    """Run train_vae.py on `tiny` with more flags and return its only output line."""

    def run(code: int, *words: str, **changed) -> str:
        given = {**tiny, "max_steps": 1, **changed}
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        try:
            flags = command_words({k: v for k, v in given.items() if v is not None})
            found = exit_code("train_vae.py", train_vae.main, [*flags, *words])
        except SystemExit as error:  # raised by argparse itself
            found = error.code
        out, err = capsys.readouterr()
        assert out == ""
        assert found == code, err
        assert err.startswith("train_vae.py: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("train_vae.py: ").rstrip("\n")

    return run


def assert_contains(line: str, tokens: tuple[str, ...]) -> None:
    """Check that the line contains the tokens in this order."""
    start = 0
    for token in tokens:
        found = line.find(token, start)
        assert found >= 0, f"{token!r} is missing (or out of order) in {line!r}"
        start = found + len(token)


# ---- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "tokens"),
    [
        ("--image_siz 3", USAGE, ("--image_siz:", "did you mean --image_size?", "--help")),
        ("--image", USAGE, ("unknown flag --image",)),  # an abbreviation could change its meaning later
        ("photos", USAGE, ("photos",)),
        ("--mixed_precision yes", USAGE, ("yes",)),
        ("--channels 32,64,64", USAGE, ("--channels", "int", "'32,64,64'")),
        ("--device gpu", USAGE, ("--device", "'gpu'", "cuda")),
        ("--learning_rate -1", CONFIG, ("--learning_rate -1.0", "minimum", "0")),
        ("--learning_rate inf", CONFIG, ("--learning_rate inf", "finite", "0.001")),
        ("--val_split 0.95", CONFIG, ("--val_split 0.95", "maximum", "0.9")),
        ("--num_workers many", CONFIG, ("--num_workers many", "whole number", "auto")),
        ("--output_dir=", CONFIG, ("--output_dir", "no value")),
    ],
)
def test_invalid_flag(mistake, words, code, tokens):
    assert_contains(mistake(code, *words.split()), tokens)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("--channels 8 16 16 16 --image_size 500", ("--image_size 500", "multiple of 8", "496 or 504")),
        ("--channels 6 16", ("--channels", "6", "--norm_groups 4")),
        ("--reconstruction_weight 0", ("--reconstruction_weight 0", "--perceptual_weight 0")),
        ("--device cuda", ("--device cuda", "--device cpu")),
        ("--early_stopping 3 --val_split 0", ("--early_stopping 3", "validation set", "--val_path")),
        (
            "--adversarial_weight 1 --disc_layers 9",
            ("--disc_layers 9", "1536 px", "32", "lower --disc_layers or raise --image_size"),
        ),
        (
            "--perceptual_weight 1 --perceptual_weights /nothing.pth",
            ("--perceptual_weights /nothing.pth", "--perceptual_weight 0"),
        ),
    ],
)
def test_contradicting_values(mistake, words, tokens):
    if "--device cuda" in words and torch.cuda.is_available():
        pytest.skip("a CUDA device is available")
    assert_contains(mistake(CONFIG, *words.split()), tokens)


@pytest.mark.parametrize(
    ("listed", "tokens"),
    [
        ("512", ("--progressive 512", "'512'", "SIZE:EPOCHS:BATCH", "512:25:32,1024:50:16")),
        ("32:0:2", ("--progressive 32:0:2", "'32:0:2'")),
        ("32:1:2,33:1:2", ("--image_size 33", "multiple of 2", "32 or 34")),
    ],
)
def test_invalid_progressive_list(mistake, listed, tokens):
    assert_contains(mistake(CONFIG, "--progressive", listed), tokens)


def test_every_stage_is_checked_before_the_first_one_starts(mistake):
    assert_contains(mistake(DATA, "--progressive", "32:1:2,16:1:100"), ("--batch_size 100",))


# ---- the JSON file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('{"image_siz": 32}', ('"image_siz"', "did you mean image_size?")),
        ('{"config": "other.json"}', ('"config"', "one file")),
        ("[1, 2]", ("one object", '{"image_size": 1024}')),
        ("{", ("is not valid JSON", "Expecting property name")),
        ('{"seed": 1, "seed": 2}', ("my.json is not valid JSON", 'key "seed" twice')),
        ('{"val_freq": 3.5}', ("my.json", "--val_freq", "int", "3.5")),
        ('{"seed": null}', ("--seed", "int", "None")),
        ('{"use_bf16": 1}', ("--use_bf16", "1")),
        ('{"channels": [8, "x"]}', ("--channels", "int", "'x'")),
    ],
)
def test_invalid_json_file(mistake, tmp_path, text, tokens):
    path = tmp_path / "my.json"
    path.write_text(text, encoding="utf-8")
    assert_contains(mistake(CONFIG, "--config", str(path)), tokens)


def test_unreadable_json_file(mistake, tmp_path):
    missing = str(tmp_path / "nothing.json")
    assert_contains(mistake(CONFIG, "--config", missing), (f"--config {missing}", "No such file"))
    assert_contains(mistake(CONFIG, "--config", str(tmp_path)), (f"--config {tmp_path}", "cannot be read"))
    (tmp_path / "image.json").write_bytes(b"\xff\xd8\xff\xe0")
    assert "is not valid JSON" in mistake(CONFIG, "--config", str(tmp_path / "image.json"))


# ---- the images ----------------------------------------------------------------------------------------


def test_fewer_images_than_one_batch(mistake):
    tokens = ("--batch_size 13", "1 accumulation", "12", "lower --batch_size")
    assert_contains(mistake(DATA, "--batch_size", "13"), tokens)
    tokens = ("--batch_size 4", "4 accumulation", "12", "lower --batch_size")
    assert_contains(mistake(DATA, "--accumulation_steps", "4"), tokens)


# ---- resuming ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(image_folder, tmp_path_factory) -> Path:
    """The folder of a finished run with a discriminator."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    disc = {"adversarial_weight": 0.5, "disc_start": 0.5, "disc_channels": 8, "disc_layers": 1}
    given = {**TINY, **disc, "data_path": str(image_folder), "output_dir": str(folder), "num_epochs": 1}
    assert train_vae.main(command_words(given)) == 0
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    """A copy of the run's checkpoint that a test may damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run" / "checkpoint_epoch_1.pt"


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("--channels 8 32", ("--channels 8 32", "--resume_from", "8 16")),
        ("--z_channels 8", ("--z_channels 8", "--resume_from", "4", "remove --z_channels")),
        ("--disc_channels 16", ("--disc_channels 16", "--resume_from", "8")),
        ("--init_from /nothing", ("--init_from", "--resume_from", "only one")),
        ("--progressive 16:5:2", ("--progressive", "16:5:2", "32:1:4")),
    ],
)
def test_flag_that_contradicts_the_checkpoint(mistake, checkpoint, words, tokens):
    assert_contains(mistake(CONFIG, "--resume_from", str(checkpoint), *words.split()), tokens)
