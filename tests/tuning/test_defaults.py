"""Mistakes in a command of tune_vae.py are one line, before anything is written."""

import json
import shutil

import pytest

import tune_vae
from tests.harness.training_runs import records
from vae.config.flags import parse_flags
from vae.config.tune_flags import parse_tune_flags
from vae.system.errors import UserError
from vae.training.run import train
from vae.training.schedule import MAX_PEAK
from vae.tuning import defaults


def command(tmp_path, image_folder, options: dict, *words: str) -> list[str]:
    path = tmp_path / "base.json"
    path.write_text(json.dumps({"data_path": str(image_folder), "perceptual_weight": 0.0, **options}))
    return ["--config", str(path), "--output_dir", str(tmp_path / "search"), *words]


@pytest.mark.parametrize(
    ("options", "words", "parts"),
    [
        ({}, ["--objective", "pnsr"], ["--objective pnsr", "psnr"]),
        ({}, ["--objective", "psnr", "psnr"], ["--objective", "psnr twice"]),
        ({}, ["--objective", "lpips"], ["--objective lpips", "perceptual_weight"]),
        ({}, ["--cards", "1", "1"], ["--cards", "1 twice"]),
        ({}, ["--space", "quik"], ["--space quik", "quick, full"]),
        ({"progressive": "32:1:2"}, [], ["progressive", "one stage"]),
        ({"val_split": 0.0}, [], ["val_split", "val_path"]),
        ({"image_size": 513}, [], ["--image_size 513", "512"]),
        ({"learning_rat": 1}, [], ["learning_rat", "learning_rate"]),
        ({"data_path": "nowhere"}, [], ["--data_path nowhere", "does not exist"]),
    ],
)
def test_mistakes_are_named(image_folder, tmp_path, options, words, parts):
    with pytest.raises(UserError) as caught:
        tune_vae.main(command(tmp_path, image_folder, options, *words))
    for part in parts:
        assert part in str(caught.value)
    assert not (tmp_path / "search").exists()


def test_images_without_a_validation_image_are_refused_before_the_first_run(image_folder, tmp_path):
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(next(image_folder.rglob("*.png")), single)
    with pytest.raises(UserError, match=r"^--data_path .*single: no image is set aside for validation"):
        tune_vae.main(command(tmp_path, single, {}))
    assert not (tmp_path / "search").exists()


def test_missing_package_is_named_with_its_install_line(image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "find_spec", lambda name: None if name == "optuna" else name)
    with pytest.raises(UserError, match=r"needs optuna: run pip install -r requirements-tune.txt"):
        tune_vae.main(command(tmp_path, image_folder, {}))


def test_short_trials_begin_from_the_rate_that_training_would_use(image_folder, tmp_path):
    """The rule has no number for all lengths: the whole rate would end below the start of a short stage."""
    options = {"num_epochs": 10, "val_split": 0.25, "image_size": 32, "channels": [8, 8], "norm_groups": 8}
    options |= {"warmup_epochs": 0.0, "log_freq": 1, "max_steps": 1}
    words = command(tmp_path, image_folder, options)
    base = defaults.check_command(parse_tune_flags(words))
    assert train(parse_flags([*words[:2], "--output_dir", str(tmp_path / "run")])) == 0
    (record,) = records(tmp_path / "run", "train")
    assert base.config.optim.learning_rate == pytest.approx(record["learning_rate"])
    assert 0 < record["learning_rate"] < MAX_PEAK / 4
    assert base.space["learning_rate"].contains(record["learning_rate"])
